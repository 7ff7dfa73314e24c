"""Every element of every tensor on the ranks that Megatron gives it, under every axis.

The other description here goes rank by rank and element by element: it enumerates ranks in nested loops, slices arrays
of element numbers as modules would cut their weights, and concatenates them as buffers do.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_etc.planners.boxes import Box, flat_range_to_boxes
from ray_etc.planners.expected import expected_layouts, expected_table
from ray_etc.planners.layout import TensorSpec
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.ranges import ranges_to_boxes
from ray_etc.planners.table import LayoutTable
from ray_etc.planners.zoo import ZOO

KINDS = {"param": ("bfloat16", 2), "main_param": ("float32", 4), "exp_avg": ("float32", 4)}
Held = dict[tuple[int, str, str], Counter[int]]
"""How often a rank holds each element: (rank, kind, name) to the numbers of elements."""


def model(layers: int, *, experts: int = 4, dense_layers: Sequence[int] = ()) -> list[TensorSpec]:
    """Sizes that few axes divide, a tied output, experts and a bias of them that is not trained, and a scalar."""
    parts: list[tuple[str, tuple[int, ...], int | None, int | None, int | None]] = [("embedding", (7, 3), 0, -1, None)]
    for layer in range(layers):
        parts += [
            (f"{layer}.norm", (3,), None, layer, None),
            (f"{layer}.proj", (3, 5), 1, layer, None),
            (f"{layer}.qkv", (5, 3), 0, layer, None),
        ]
        if layer not in dense_layers:
            parts += [
                (f"{layer}.router", (experts, 3), None, layer, None),
                (f"{layer}.fc1_v", (experts, 3, 2), 1, layer, 0),
                (f"{layer}.fc1_w", (experts, 3, 2), 1, layer, 0),
                (f"{layer}.fc2", (experts, 2, 3), 2, layer, 0),
                (f"{layer}.shared", (5, 3), 0, layer, None),
            ]
    parts += [
        ("norm", (3,), None, layers, None),
        ("embedding", (7, 3), 0, layers, None),
        ("temperature", (), None, None, None),
    ]
    listed = [
        TensorSpec(kind, name, shape, dtype, itemsize, split_dim, layer, expert_dim)
        for kind, (dtype, itemsize) in KINDS.items()
        for name, shape, split_dim, layer, expert_dim in parts
    ]
    biases = [TensorSpec("buffer", f"{layer}.bias", (experts,), "float32", 4, layer=layer) for layer in range(layers)]
    return listed + biases


def numbers(tensor: TensorSpec) -> np.ndarray:
    return np.arange(prod(tensor.shape)).reshape(tensor.shape)


def chunk(array: np.ndarray, dim: int, index: int, size: int) -> np.ndarray:
    length = -(-array.shape[dim] // size)
    return array[(slice(None),) * dim + (slice(index * length, (index + 1) * length),)]


def held_by_hand(tensors: Sequence[TensorSpec], layers: int, parallel: ParallelConfig) -> Held:
    p = parallel
    tp, cp, dp, pp = p.tensor_parallel, p.context_parallel, p.data_parallel, p.pipeline_parallel
    etp, ep = p.expert_tensor_parallel or tp, p.expert_parallel
    dense_order = list(product(range(pp), range(dp), range(cp), range(tp)))
    expert_order = list(product(range(pp), range(tp * cp * dp // (etp * ep)), range(ep), range(etp)))
    assert len(dense_order) == len(expert_order)
    held: Held = {}
    for rank, ((stage, data, context, tensor), (_, expert_data, expert, expert_tensor)) in enumerate(
        zip(dense_order, expert_order, strict=True)
    ):
        replica, replicas = data * cp + context, dp * cp

        def part(spec: TensorSpec, at: tuple[int, int, int] = (tensor, expert_tensor, expert)) -> np.ndarray:
            array = numbers(spec)
            if spec.expert_dim is not None:
                array = chunk(array, spec.expert_dim, at[2], ep)
                return array if spec.split_dim is None else chunk(array, spec.split_dim, at[1], etp)
            return array if spec.split_dim is None else chunk(array, spec.split_dim, at[0], tp)

        for number in range(p.virtual_pipeline):
            mine = [t for t in tensors if is_there(t, stage, number, layers, p)]
            for kind in {t.kind for t in mine}:
                of_kind = [t for t in mine if t.kind == kind]
                if p.fully_sharded and kind != "buffer":
                    for t in of_kind:
                        array = part(t) if t.shape else part(t).reshape(1)
                        index, size = (replica, replicas)
                        if t.expert_dim is not None:
                            index, size = expert_data, tp * cp * dp // (etp * ep)
                        note(held, rank, t, chunk(array, 0, index, size))
                elif kind in ("param", "buffer") or not p.distributed_optimizer:
                    for t in of_kind:
                        note(held, rank, t, part(t))
                else:
                    own_mesh = ep > 1 or etp != tp
                    buffers = [[t for t in of_kind if t.expert_dim is None or not own_mesh]]
                    buffers += [[t for t in of_kind if t.expert_dim is not None and own_mesh]]
                    places = [(replica, replicas), (expert_data, tp * cp * dp // (etp * ep))]
                    for listed, (index, size) in zip(buffers, places, strict=True):
                        flat = [(t, n) for t, array in parameters(listed, part)[::-1] for n in array.ravel().tolist()]
                        length = -(-len(flat) // size)
                        for t, n in flat[index * length : (index + 1) * length]:
                            note(held, rank, t, np.array([n]))
    return {key: count for key, count in held.items() if count}


def parameters(
    listed: Sequence[TensorSpec], part: Callable[[TensorSpec], np.ndarray]
) -> list[tuple[TensorSpec, np.ndarray]]:
    """(tensor, array) one by one in the order of a module's parameters: the grouped matrices one expert at a time."""
    found = []
    for position, t in enumerate(listed):
        if t.expert_dim is None:
            found.append((t, part(t)))
        elif t.name.endswith("fc1_v"):
            gate = listed[position + 1]
            assert gate.name.endswith("fc1_w")
            for up_of_one, gate_of_one in zip(part(t), part(gate), strict=True):
                found += [(t, up_of_one), (gate, gate_of_one)]
        elif not t.name.endswith("fc1_w"):
            found += [(t, of_one) for of_one in part(t)]
    return found


def is_there(t: TensorSpec, stage: int, number: int, layers: int, p: ParallelConfig) -> bool:
    """Whether chunk `number` of `stage` has it: chunks go round the stages, one after the other."""
    if t.layer is None:
        return number == 0
    pp, vpp = p.pipeline_parallel, p.virtual_pipeline
    counts = p.pipeline_layers or (layers // (pp * vpp),) * (pp * vpp)
    if len(counts) == pp:
        counts = tuple(count // vpp for count in counts) * vpp
    chunk_of_layer = [at for at, count in enumerate(counts) for _ in range(count)]
    at = 0 if t.layer < 0 else chunk_of_layer[t.layer] if t.layer < layers else pp * vpp - 1
    return at == number * pp + stage


def note(held: Held, rank: int, tensor: TensorSpec, elements: np.ndarray) -> None:
    held.setdefault((rank, tensor.kind, tensor.name), Counter()).update(elements.ravel().tolist())


def held_by_table(table: LayoutTable) -> Held:
    held: Held = {}
    rows = zip(table.family, table.rank, table.offsets, table.lengths, strict=True)
    for family, rank, offsets, lengths in rows:
        for tensor in table.families[family]:
            index = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            padded = numbers(tensor).reshape(tensor.shape + (1,) * (len(offsets) - len(tensor.shape)))
            assert padded[index].size == prod(lengths.tolist()) > 0
            note(held, int(rank), tensor, padded[index])
    return held


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, ParallelConfig]:
    sizes = st.sampled_from([1, 2, 3])
    tp, cp, dp, pp = (draw(sizes) for _ in range(4))
    etp = draw(st.sampled_from([None, *(n for n in (1, 2, 3) if tp * cp * dp % n == 0)]))
    ep = draw(st.sampled_from([n for n in (1, 2, 3, 4) if tp * cp * dp % (n * (etp or tp)) == 0]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    form = draw(st.sampled_from(["plain", "zero1", "fsdp"]))
    stages = None
    if draw(st.booleans()):
        stages = tuple(draw(st.integers(0, 2)) for _ in range(pp * vpp))
    layers = sum(stages) if stages else pp * vpp * draw(st.sampled_from([1, 2]))
    return layers, ParallelConfig(
        tp,
        pp,
        dp,
        distributed_optimizer=form != "plain",
        context_parallel=cp,
        expert_parallel=ep,
        expert_tensor_parallel=etp,
        virtual_pipeline=vpp,
        pipeline_layers=stages,
        fully_sharded=form == "fsdp",
    )


@settings(max_examples=150, deadline=None)
@given(cases(), st.data())
def test_every_element_is_where_megatron_has_it(case: tuple[int, ParallelConfig], data: st.DataObject) -> None:
    layers, parallel = case
    dense = data.draw(st.sets(st.integers(0, max(layers - 1, 0))))
    tensors = model(layers, experts=data.draw(st.sampled_from([4, 5])), dense_layers=sorted(dense))
    table = expected_table(tensors, parallel)
    assert held_by_table(table) == held_by_hand(tensors, layers, parallel)
    keys = [tensor.key for family in table.families for tensor in family]
    assert len(keys) == len(set(keys))
    assert all(len({tensor.shape for tensor in family}) == 1 for family in table.families)
    assert (np.diff(table.family) >= 0).all()


@settings(max_examples=30, deadline=None)
@given(cases())
def test_lists_of_shards_say_the_same(case: tuple[int, ParallelConfig]) -> None:
    layers, parallel = case
    tensors = model(layers)
    held: Held = {}
    for rank, layout in enumerate(expected_layouts(tensors, parallel)):
        for shard in layout:
            index = tuple(slice(o, o + n) for o, n in zip(shard.box.offsets, shard.box.lengths, strict=True))
            if shard.box.numel:
                note(held, rank, shard.tensor, numbers(shard.tensor)[index])
    assert held == held_by_table(expected_table(tensors, parallel))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_ranges_are_cut_as_one_by_one(shape: list[int], data: st.DataObject) -> None:
    numel = prod(shape)
    ends = data.draw(st.lists(st.tuples(st.integers(0, numel), st.integers(0, numel)), max_size=5))
    start, stop = (np.array([end[side] for end in ends], dtype=np.int64) for side in (0, 1))
    which, offsets, lengths = ranges_to_boxes(start, stop, np.tile(shape, (len(ends), 1)))
    found: list[set[Box]] = [set() for _ in ends]
    for number, a, n in zip(which.tolist(), offsets.tolist(), lengths.tolist(), strict=True):
        found[number].add(Box(tuple(a), tuple(n)))
    assert len(which) == sum(map(len, found))
    for (low, high), boxes in zip(ends, found, strict=True):
        assert boxes == {box for box, _ in flat_range_to_boxes(low, high, tuple(shape))}
        assert len(boxes) <= 2 * len(shape) - 1


def test_stages_must_hold_the_layers_of_the_model() -> None:
    with pytest.raises(ValueError, match=r"pipeline_layers=\(2, 4\) are 6 layers; the model has 4$"):
        expected_table(model(4), ParallelConfig(pipeline_parallel=2, pipeline_layers=(2, 4)))


@pytest.mark.parametrize(
    ("name", "parallel", "limit_s"),
    [
        ("llama3-70b", ParallelConfig(8, 4, 48), 0.15),
        ("llama3-405b", ParallelConfig(8, 16, 128), 1.0),
        ("deepseek-v3", ParallelConfig(1, 8, 256, expert_parallel=64), 0.7),
    ],
)
def test_large_layouts_hold_the_model_and_take_no_time(name: str, parallel: ParallelConfig, limit_s: float) -> None:
    shape = ZOO[name]
    parallel = shape.settled(parallel)
    tensors = shape.tensors(parallel.pipeline_parallel)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        table = expected_table(tensors, parallel)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < limit_s
    nbytes: dict[str, float] = defaultdict(float)
    numel = np.bincount(table.family, table.lengths.prod(axis=1), len(table.families))
    for family, held in zip(table.families, numel.tolist(), strict=True):
        for tensor in family:
            nbytes[tensor.kind] += held * tensor.itemsize
    # Norms and routers are on every tensor-parallel rank: a thousandth at most.
    assert nbytes["exp_avg"] == pytest.approx(4 * shape.num_parameters, rel=1e-3)
    assert nbytes["main_param"] == nbytes["exp_avg_sq"] == nbytes["exp_avg"]
