"""The proof of a plan: each target element is written exactly once, from a shard that holds it.

The proof uses nothing of the code that makes plans, only the arithmetic of boxes. Work is near-linear in the number
of moves: they are grouped by the shard that they write, and overlaps inside a shard are found by sorting.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ray_etc.planners.boxes import Box
from ray_etc.planners.errors import PlanError
from ray_etc.planners.layout import Shard
from ray_etc.planners.regions import subtract

if TYPE_CHECKING:
    from ray_etc.planners.plan import MigrationPlan, Move


def check(plan: MigrationPlan) -> None:
    """Prove `plan`, or raise PlanError with the tensor, the box and the ranks."""
    _check_ranks(plan)
    written: dict[tuple[int, int], list[Move]] = defaultdict(list)
    own: dict[tuple[int, tuple[str, str]], list[Box]] = defaultdict(list)
    for rank, layout in enumerate(plan.source):
        for shard in layout:
            own[rank, shard.tensor.key].append(shard.box)
    for move in plan.local:
        _check_move(plan, move)
        if not move.is_local:
            raise _error("a move between two ranks is listed as local", plan, move)
        written[move.dst_rank, move.dst_shard].append(move)
    for moves in plan.rounds:
        for move in moves:
            tensor = _check_move(plan, move).tensor
            if move.is_local:
                raise _error("a move inside one rank is listed in a round", plan, move)
            if any(move.box.intersect(box) for box in own[move.dst_rank, tensor.key]):
                raise _error("a move fetches what the destination's own slot holds", plan, move)
            written[move.dst_rank, move.dst_shard].append(move)
    for rank, layout in enumerate(plan.target):
        for position, shard in enumerate(layout):
            _check_shard(rank, shard, written[rank, position])
    _check_rounds(plan)
    if plan.nbytes_wire < plan.nbytes_lower_bound:
        raise PlanError(f"{plan.nbytes_wire} bytes on the wire are below the bound of {plan.nbytes_lower_bound}")


def _check_ranks(plan: MigrationPlan) -> None:
    count = len(plan.slots)
    if not len(plan.nodes) == len(plan.source) == len(plan.target) == count:
        raise PlanError(
            f"{count} slots, {len(plan.nodes)} nodes, {len(plan.source)} source and {len(plan.target)} target layouts"
        )
    if list(plan.slots) != sorted(set(plan.slots)):
        raise PlanError(f"slots {plan.slots} are not in order or not distinct")


def _check_move(plan: MigrationPlan, move: Move) -> Shard:
    """The target shard of a move that reads and writes where it may."""
    shards = []
    for layouts, rank, position in (
        (plan.source, move.src_rank, move.src_shard),
        (plan.target, move.dst_rank, move.dst_shard),
    ):
        if not (0 <= rank < len(layouts) and 0 <= position < len(layouts[rank])):
            raise PlanError(f"{move} names a shard that is not there", (move.src_rank, move.dst_rank), None, move.box)
        shards.append(layouts[rank][position])
    src, dst = shards
    if src.tensor.key != dst.tensor.key:
        raise _error(f"a move reads another tensor, {' '.join(src.tensor.key)}", plan, move)
    if (src.tensor.shape, src.tensor.dtype, src.tensor.itemsize) != (
        dst.tensor.shape,
        dst.tensor.dtype,
        dst.tensor.itemsize,
    ):
        raise _error(f"a move reads {src.tensor.dtype} {src.tensor.shape} as another shape or dtype", plan, move)
    if len(move.box.offsets) != len(dst.tensor.shape) or min(move.box.lengths, default=1) < 1:
        raise _error("a move's box is empty or has other dims than its tensor", plan, move)
    for shard, what in ((src, "reads outside its source shard"), (dst, "writes outside its target shard")):
        if not _contains(shard.box, move.box):
            raise _error(f"a move {what}", plan, move)
    if move.nbytes != move.box.numel * dst.tensor.itemsize:
        raise _error(f"a move of {move.box.numel * dst.tensor.itemsize} bytes is given as {move.nbytes}", plan, move)
    return dst


def _check_shard(rank: int, shard: Shard, moves: Sequence[Move]) -> None:
    """Every element of the shard is written exactly once."""
    clash = _find_overlap(moves)
    if clash is not None:
        first, second = clash
        raise PlanError(
            "elements are written twice",
            (first.src_rank, second.src_rank, rank),
            shard.tensor.key,
            first.box.intersect(second.box),
        )
    # Disjoint boxes inside the shard with as many elements as the shard are the shard.
    if sum(move.box.numel for move in moves) != shard.box.numel:
        rest = [shard.box]
        for move in moves:
            rest = subtract(rest, move.box)
        count = sum(box.numel for box in rest)
        raise PlanError(f"{count} elements are never written, the first here", (rank,), shard.tensor.key, rest[0])


def _find_overlap(moves: Sequence[Move]) -> tuple[Move, Move] | None:
    """Two moves whose boxes share an element, or None.

    Sorting along a dim falls into runs that do not touch each other; each run is divided again along the other
    dims. Boxes that came from cuts fall apart into single ones. Only what no dim divides is compared pair by pair.
    """
    pending: list[tuple[Sequence[Move], int, int]] = [(moves, 0, 0)]
    while pending:
        group, dim, stuck = pending.pop()
        if len(group) < 2:
            continue
        ndim = len(group[0].box.lengths)
        if stuck >= ndim:
            for index, first in enumerate(group):
                for second in group[index + 1 :]:
                    if first.box.intersect(second.box) is not None:
                        return first, second
            continue
        runs = list(_runs(group, dim))
        stuck = stuck + 1 if len(runs) == 1 else 1
        pending.extend((run, (dim + 1) % ndim, stuck) for run in runs)
    return None


def _runs(moves: Sequence[Move], dim: int) -> Iterable[list[Move]]:
    """Moves whose extents along `dim` overlap, directly or through others, stay together."""
    run: list[Move] = []
    run_stop = 0
    for move in sorted(moves, key=lambda move: move.box.offsets[dim]):
        start = move.box.offsets[dim]
        if run and start >= run_stop:
            yield run
            run = []
        run.append(move)
        run_stop = max(run_stop, start + move.box.lengths[dim])
    if run:
        yield run


def _check_rounds(plan: MigrationPlan) -> None:
    for index, moves in enumerate(plan.rounds):
        for verb, nbytes in (
            ("sends", _sum((move.src_rank, move.nbytes) for move in moves)),
            ("receives", _sum((move.dst_rank, move.nbytes) for move in moves)),
        ):
            for rank, total in nbytes.items():
                if total > plan.staging_nbytes:
                    raise PlanError(
                        f"in round {index} a rank {verb} {total} bytes, more than the {plan.staging_nbytes} of staging",
                        (rank,),
                    )


def _sum(parts: Iterable[tuple[int, int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for rank, nbytes in parts:
        total[rank] += nbytes
    return total


def _contains(outer: Box, inner: Box) -> bool:
    return all(
        a <= b and b + m <= a + n
        for a, n, b, m in zip(outer.offsets, outer.lengths, inner.offsets, inner.lengths, strict=True)
    )


def _error(reason: str, plan: MigrationPlan, move: Move) -> PlanError:
    tensor = plan.target[move.dst_rank][move.dst_shard].tensor
    return PlanError(reason, (move.src_rank, move.dst_rank), tensor.key, move.box)
