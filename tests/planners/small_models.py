"""Small models with everything that is awkward to cut, and an executor that trusts nothing of the planner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ray_etc.planners.boxes import Box
from ray_etc.planners.expected import expected_layouts
from ray_etc.planners.layout import RankLayout, TensorSpec
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.plan import MigrationPlan
from ray_etc.planners.rank_plan import Move
from ray_etc.planners.regions import disjoint

KINDS = {"param": ("bfloat16", 2), "main_param": ("float32", 4), "exp_avg": ("float32", 4)}


def small_model(*, layers: int = 2, vocab: int = 13, hidden: int = 4) -> list[TensorSpec]:
    """A Llama-shaped model: an odd vocabulary, a tied output, fewer KV rows than large tensor axes, a scalar."""
    last = layers
    parts: list[tuple[str, tuple[int, ...], int | None, int | None]] = [("embedding", (vocab, hidden), 0, -1)]
    for layer in range(layers):
        parts += [
            (f"{layer}.norm", (hidden,), None, layer),
            (f"{layer}.q", (6, hidden), 0, layer),
            (f"{layer}.k", (2, hidden), 0, layer),
            (f"{layer}.v", (2, hidden), 0, layer),
            (f"{layer}.out", (hidden, 6), 1, layer),
            (f"{layer}.gate", (5, hidden), 0, layer),
            (f"{layer}.up", (5, hidden), 0, layer),
            (f"{layer}.down", (hidden, 5), 1, layer),
            (f"{layer}.experts", (2, 3, hidden), 1, layer),
        ]
    parts += [
        ("norm", (hidden,), None, last),
        ("embedding", (vocab, hidden), 0, last),
        ("temperature", (), None, None),
    ]
    return [
        TensorSpec(kind, name, shape, dtype, itemsize, split_dim, layer)
        for kind, (dtype, itemsize) in KINDS.items()
        for name, shape, split_dim, layer in parts
    ]


def config(tp: int = 1, pp: int = 1, dp: int = 1, *, zero: bool = False) -> ParallelConfig:
    return ParallelConfig(tp, pp, dp, distributed_optimizer=zero)


def name_of(parallel: ParallelConfig) -> str:
    """`tp2_dp2_zero`, with axes of size 1 left out."""
    sizes = {"tp": parallel.tensor_parallel, "pp": parallel.pipeline_parallel, "dp": parallel.data_parallel}
    parts = [f"{axis}{size}" for axis, size in sizes.items() if size > 1] or ["one"]
    return "_".join(parts + ["zero"] * parallel.distributed_optimizer)


def configs_up_to(world_size: int) -> list[ParallelConfig]:
    """Every (tp, pp, dp) of at most `world_size` ranks, with ZeRO-1 on and off where it makes a difference."""
    sizes = range(1, world_size + 1)
    return [
        config(tp, pp, dp, zero=zero)
        for tp in sizes
        for pp in sizes
        for dp in sizes
        for zero in (False, True)
        if tp * pp * dp <= world_size and (dp > 1 or not zero)
    ]


def layouts_on(slots: Sequence[int], parallel: ParallelConfig, tensors: Sequence[TensorSpec]) -> dict[int, RankLayout]:
    """The expected layout of rank i of `parallel` on `slots[i]`."""
    return dict(zip(slots, expected_layouts(tensors, parallel), strict=True))


def nodes_of(slots: Sequence[int], per_node: int = 2) -> dict[int, str]:
    return {slot: f"node{slot // per_node}" for slot in slots}


def logical_arrays(layouts: Sequence[RankLayout]) -> dict[tuple[str, str], np.ndarray]:
    """Every logical tensor, each element with an id that no other element of any tensor has."""
    arrays: dict[tuple[str, str], np.ndarray] = {}
    first = 0
    for layout in layouts:
        for shard in layout:
            if shard.tensor.key not in arrays:
                count = int(np.prod(shard.tensor.shape, dtype=np.int64))
                arrays[shard.tensor.key] = np.arange(first, first + count).reshape(shard.tensor.shape)
                first += count
    return arrays


def carry_out(plan: MigrationPlan) -> None:
    """Do what the ranks would do, on arrays of ids with packed messages, and compare every target element."""
    logical = logical_arrays(list(plan.source))
    held = [[logical[s.tensor.key][_index(s.box, None)].copy() for s in layout] for layout in plan.source]
    made = [[np.full(s.box.lengths, -1, dtype=np.int64) for s in layout] for layout in plan.target]
    views = [plan.for_rank(rank) for rank in range(len(plan.slots))]

    def read(move: Move) -> np.ndarray:
        if move.is_relay:
            values = made[move.src_rank][move.src_shard][
                _index(move.box, plan.target[move.src_rank][move.src_shard].box)
            ]
            assert (values != -1).all(), f"{move} hands on what is not there yet"
            return values
        return held[move.src_rank][move.src_shard][_index(move.box, plan.source[move.src_rank][move.src_shard].box)]

    def write(move: Move, values: np.ndarray) -> None:
        here = made[move.dst_rank][move.dst_shard]
        index = _index(move.box, plan.target[move.dst_rank][move.dst_shard].box)
        assert (here[index] == -1).all(), f"{move} writes what is written already"
        here[index] = values

    for view in views:
        for move in view.local:
            write(move, read(move))
    for number in range(len(plan.rounds)):
        on_the_wire = {
            (view.rank, peer): np.concatenate([read(move).ravel() for move in moves])
            for view in views
            for peer, moves in view.rounds[number].sends.items()
        }
        for view in views:
            for peer, moves in view.rounds[number].receives.items():
                message = on_the_wire.pop((peer, view.rank))
                for move in moves:
                    write(move, message[: move.box.numel].reshape(move.box.lengths))
                    message = message[move.box.numel :]
                assert message.size == 0
        assert not on_the_wire, "a message that nobody receives"
    for view in views:
        for move in view.casts:
            assert move.src_rank == move.dst_rank == view.rank
            master, made_of = (plan.target[view.rank][shard].tensor for shard in (move.src_shard, move.dst_shard))
            assert master.key == (made_of.derived_from, made_of.name)
            np.testing.assert_array_equal(read(move), logical[master.key][_index(move.box, None)])
            write(move, logical[made_of.key][_index(move.box, None)])
    for layout, arrays in zip(plan.target, made, strict=True):
        for shard, array in zip(layout, arrays, strict=True):
            np.testing.assert_array_equal(array, logical[shard.tensor.key][_index(shard.box, None)], str(shard))


def _index(box: Box, outer: Box | None) -> tuple[slice, ...]:
    """A numpy index made from offsets and lengths by hand, not by the code under test."""
    starts = outer.offsets if outer is not None else (0,) * len(box.offsets)
    return tuple(slice(o - s, o - s + n) for o, n, s in zip(box.offsets, box.lengths, starts, strict=True))


def total_nbytes(layouts: Mapping[int, RankLayout]) -> int:
    return sum(shard.nbytes for layout in layouts.values() for shard in layout)


def overlap_nbytes(held: Mapping[int, RankLayout], wanted: Sequence[RankLayout], slots: Sequence[int]) -> np.ndarray:
    """Bytes already in place: int64 of shape [len(wanted), len(slots)], one row a new rank, one column a slot.

    `held` is what each slot holds now; a slot that is not in it holds nothing. An element that a slot holds in
    several shards counts once for each shard that wants it. Tensors of another shape or dtype share nothing.
    """
    columns: dict[TensorForm, dict[int, list[Box]]] = defaultdict(lambda: defaultdict(list))
    for column, slot in enumerate(slots):
        for shard in held.get(slot, ()):
            columns[form_of(shard.tensor)][column].append(shard.box)
    regions = {
        form: {column: disjoint(boxes) for column, boxes in by_column.items()} for form, by_column in columns.items()
    }
    overlap = np.zeros((len(wanted), len(slots)), dtype=np.int64)
    # Replicas want the same boxes: each distinct one is looked up once.
    known: dict[tuple[TensorForm, Box], np.ndarray] = {}
    for rank, layout in enumerate(wanted):
        for shard in layout:
            form = form_of(shard.tensor)
            row = known.get((form, shard.box))
            if row is None:
                row = np.zeros(len(slots), dtype=np.int64)
                for column, region in regions.get(form, {}).items():
                    common = filter(None, (shard.box.intersect(box) for box in region))
                    row[column] = sum(box.numel for box in common) * shard.tensor.itemsize
                known[form, shard.box] = row
            overlap[rank] += row
    return overlap


TensorForm = tuple[str, str, tuple[int, ...], str]


def form_of(tensor: TensorSpec) -> TensorForm:
    """What must agree for bytes to be the same bytes: kind, name, shape and dtype."""
    return (tensor.kind, tensor.name, tensor.shape, tensor.dtype)
