"""Sizes and groups of a configuration, and what none can be."""

from __future__ import annotations

from typing import Any

import pytest

from ray_etc.planners.parallel import Coordinate, ParallelConfig


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel=0 must be a whole number of at least 1"),
        ({"pipeline_parallel": True}, "pipeline_parallel=True must be a whole number of at least 1"),
        ({"expert_tensor_parallel": 0}, "expert_tensor_parallel=0 must be a whole number of at least 1"),
        (
            {"data_parallel": 96, "expert_parallel": 64},
            "tensor_parallel=1 x context_parallel=1 x data_parallel=96 = 96 ranks of a stage cannot hold "
            "expert_tensor_parallel=1 x expert_parallel=64; use expert_parallel=48 or expert_parallel=96 or a multiple "
            "of 64 as data_parallel",
        ),
        (
            {"tensor_parallel": 8, "data_parallel": 3, "expert_parallel": 16, "expert_tensor_parallel": 1},
            "tensor_parallel=8 x context_parallel=1 x data_parallel=3 = 24 ranks of a stage cannot hold "
            "expert_tensor_parallel=1 x expert_parallel=16; use expert_parallel=12 or expert_parallel=24 or a multiple "
            "of 2 as data_parallel",
        ),
        (
            {"virtual_pipeline": 2},
            "virtual_pipeline=2 interleaves stages, but pipeline_parallel=1; use virtual_pipeline=1 or more stages",
        ),
        (
            {"pipeline_parallel": 2, "pipeline_layers": (1, 2, 3)},
            "pipeline_layers=(1, 2, 3) has 3 numbers; give 2, one for each of the stages of pipeline_parallel=2",
        ),
        (
            {"pipeline_parallel": 2, "virtual_pipeline": 2, "pipeline_layers": (3, 2)},
            "pipeline_layers=(3, 2) cannot be split into virtual_pipeline=2 chunks a stage; give all 4 chunks, in the "
            "order of the model",
        ),
        (
            {"pipeline_parallel": 2, "pipeline_layers": (3, -1)},
            "pipeline_layers=(3, -1) must be whole numbers of at least 0",
        ),
        (
            {"fully_sharded": True, "distributed_optimizer": False},
            "fully_sharded=True splits the optimizer state too: distributed_optimizer=False is no choice",
        ),
    ],
)
def test_refused_with_the_numbers(axes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  the whole message is compared
        ParallelConfig(**axes)
    assert str(error.value) == message


def test_world_sizes_are_multiples_of_what_holds_one_model() -> None:
    parallel = ParallelConfig(2, 4, 8, context_parallel=2, expert_parallel=16, expert_tensor_parallel=1)
    assert (parallel.stage_size, parallel.world_size, parallel.expert_replicas) == (32, 128, 2)
    assert parallel.model_parallel == 64  # 4 stages of the 16 ranks that one copy of the experts takes
    assert parallel.with_world_size(192).data_parallel == 12
    with pytest.raises(
        ValueError,
        match=r"^96 ranks cannot hold tensor_parallel=2 x pipeline_parallel=4 x context_parallel=2 x "
        r"expert_tensor_parallel=1 x expert_parallel=16; use a multiple of 64$",
    ):
        parallel.with_world_size(96)


def test_data_index_counts_context_and_data_as_one() -> None:
    parallel = ParallelConfig(2, 2, 2, context_parallel=2)
    assert [parallel.coordinate(rank) for rank in (0, 1, 2, 4, 8)] == [
        Coordinate(0, 0, 0),
        Coordinate(1, 0, 0, 1),
        Coordinate(0, 1, 0),
        Coordinate(0, 2, 0),
        Coordinate(0, 0, 1),
    ]


@pytest.mark.parametrize(
    ("axes", "node_size", "size"),
    [
        ({"tensor_parallel": 2, "data_parallel": 8}, None, 2),
        ({"tensor_parallel": 2, "data_parallel": 8}, 8, 2),
        ({"tensor_parallel": 2, "data_parallel": 4, "context_parallel": 2}, 8, 4),
        ({"tensor_parallel": 2, "data_parallel": 4, "context_parallel": 8}, 8, 2),
        ({"data_parallel": 16, "expert_parallel": 8}, 8, 8),
        ({"data_parallel": 16, "expert_parallel": 16}, 8, 1),
        ({"data_parallel": 12, "expert_parallel": 6}, 8, 1),
        ({"tensor_parallel": 2, "data_parallel": 8, "expert_parallel": 2, "expert_tensor_parallel": 4}, 8, 8),
        ({"tensor_parallel": 2, "data_parallel": 8, "expert_parallel": 2, "expert_tensor_parallel": 4}, None, 4),
    ],
)
def test_groups_that_should_share_a_node(axes: dict[str, Any], node_size: int | None, size: int) -> None:
    parallel = ParallelConfig(**axes)
    groups = parallel.tensor_groups(node_size)
    assert [rank for group in groups for rank in group] == list(range(parallel.world_size))
    assert {len(group) for group in groups} == {size}


@pytest.mark.parametrize(
    ("parallel", "layers", "expected"),
    [
        (ParallelConfig(1, 2), 5, (3, 2)),
        (ParallelConfig(1, 2, virtual_pipeline=2), 8, (2, 2, 2, 2)),
        (ParallelConfig(1, 2, virtual_pipeline=2, pipeline_layers=(2, 4)), 6, (1, 2, 1, 2)),
        (ParallelConfig(1, 2, virtual_pipeline=2, pipeline_layers=(0, 2, 2, 1)), 5, (0, 2, 2, 1)),
    ],
)
def test_layers_of_each_chunk_in_the_order_of_the_model(
    parallel: ParallelConfig, layers: int, expected: tuple[int, ...]
) -> None:
    assert parallel.layers_of_virtual_stages(layers) == expected


def test_named_by_the_axes_it_has() -> None:
    parallel = ParallelConfig(
        2,
        2,
        8,
        context_parallel=2,
        expert_parallel=4,
        expert_tensor_parallel=1,
        virtual_pipeline=2,
        pipeline_layers=(1, 2, 2, 1),
        fully_sharded=True,
    )
    assert str(parallel) == "TP2 PP2 DP8 CP2 EP4 ETP1 VPP2 layers 1-2-2-1 FSDP"
    assert str(ParallelConfig(data_parallel=2, sequence_parallel=True)) == "TP1 PP1 DP2 SP ZeRO-1"
