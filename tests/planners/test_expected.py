"""Expected layouts cover the model once a data replica, on the stages and in the order that Megatron uses."""

from __future__ import annotations

from collections import Counter

import pytest
from small_models import config, configs_up_to, name_of, small_model

from ray_etc.planners.boxes import Box
from ray_etc.planners.expected import expected_layouts
from ray_etc.planners.layout import TensorSpec
from ray_etc.planners.parallel import ParallelConfig


@pytest.mark.parametrize("parallel", configs_up_to(6), ids=name_of)
def test_every_element_is_held_as_often_as_it_should(parallel: ParallelConfig) -> None:
    model = [TensorSpec(kind, "w", (5, 3), "float32", 4, split_dim=0, layer=0) for kind in ("param", "exp_avg")]
    held: Counter[tuple[str, int, int]] = Counter()
    for layout in expected_layouts(model, parallel):
        for shard in layout:
            (row, column), (rows, columns) = shard.box.offsets, shard.box.lengths
            held.update(
                (shard.tensor.kind, r, c) for r in range(row, row + rows) for c in range(column, column + columns)
            )
    copies = {
        "param": parallel.data_parallel,
        "exp_avg": 1 if parallel.distributed_optimizer else parallel.data_parallel,
    }
    assert held == {(kind, r, c): copies[kind] for kind in copies for r in range(5) for c in range(3)}


def test_tp2_cuts_in_ceil_chunks_and_tp8_leaves_the_last_empty() -> None:
    (embedding, *_) = [tensor for tensor in small_model(vocab=13) if tensor.name == "embedding"]
    lengths = {
        tp: [layout[0].box.lengths[0] for layout in expected_layouts([embedding], config(tp=tp))] for tp in (2, 8)
    }
    assert lengths == {2: [7, 6], 8: [2, 2, 2, 2, 2, 2, 1, 0]}


@pytest.mark.parametrize(
    ("layers", "pp", "with_ends", "expected"),
    [
        (4, 2, True, [0, 0, 1, 1]),
        (4, 2, False, [0, 0, 1, 1]),
        (4, 4, True, [0, 1, 2, 3]),
        (4, 4, False, [0, 1, 2, 3]),
        (8, 4, False, [0, 0, 1, 1, 2, 2, 3, 3]),
        (5, 2, True, [0, 0, 0, 1, 1]),
    ],
)
def test_layers_are_spread_evenly(layers: int, pp: int, with_ends: bool, expected: list[int]) -> None:
    """Even spreads come out right also where nothing follows the last layer, which then passes for what follows."""
    tensors = [TensorSpec("param", str(i), (1,), "float32", 4, layer=i) for i in range(layers)]
    ends = [TensorSpec("param", str(i), (1,), "float32", 4, layer=i) for i in (-1, layers)] if with_ends else []
    layouts = expected_layouts(tensors + ends, config(pp=pp))
    stage_of = {shard.tensor.name: stage for stage, layout in enumerate(layouts) for shard in layout}
    assert [stage_of[str(i)] for i in range(layers)] == expected
    if with_ends:
        assert (stage_of["-1"], stage_of[str(layers)]) == (0, pp - 1)


def test_layer_none_is_on_every_stage() -> None:
    layouts = expected_layouts(small_model(), config(pp=3))
    assert all(any(shard.tensor.name == "temperature" for shard in layout) for layout in layouts)


def test_dp2_zero_takes_flat_ranges_from_the_last_tensor_back() -> None:
    model = [TensorSpec("exp_avg", name, shape, "float32", 4, layer=0) for name, shape in (("a", (3, 2)), ("b", (4,)))]
    first, second = expected_layouts(model, config(dp=2, zero=True))
    assert [(shard.tensor.name, shard.box) for shard in first] == [("b", Box((0,), (4,))), ("a", Box((0, 0), (1, 1)))]
    assert [(shard.tensor.name, shard.box) for shard in second] == [
        ("a", Box((0, 1), (1, 1))),
        ("a", Box((1, 0), (2, 2))),
    ]
