"""The proof of a plan: each target element is written exactly once, from a shard that holds it by then.

The proof uses nothing of the code that makes plans, only the arithmetic of boxes. Work is near-linear in the number
of moves: boxes are grouped by the shard that they write, and overlaps inside a shard are found by a sweep.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ray_etc.planners.boxes import Box
from ray_etc.planners.errors import PlanError
from ray_etc.planners.intersect import BoxArray, join, ranges
from ray_etc.planners.moves import CAST, LOCAL
from ray_etc.planners.regions import subtract

if TYPE_CHECKING:
    from ray_etc.planners.plan import MigrationPlan


def check(plan: MigrationPlan) -> None:
    """Prove `plan`, or raise PlanError with the tensor, the box and the ranks."""
    _check_ranks(plan)
    _check_bundles(plan)
    _check_rows(plan)
    _check_ends(plan)
    _check_written_once(plan)
    _check_relays(plan)
    _check_rounds(plan)
    made = plan.nbytes_wire + plan.nbytes_cast
    if made < plan.nbytes_lower_bound:
        raise PlanError(f"{made} bytes that do not stay are below the bound of {plan.nbytes_lower_bound}")


def _check_ranks(plan: MigrationPlan) -> None:
    count = len(plan.slots)
    if not len(plan.nodes) == len(plan.source) == len(plan.target) == count:
        raise PlanError(
            f"{count} slots, {len(plan.nodes)} nodes, {len(plan.source)} source and {len(plan.target)} target layouts"
        )
    if list(plan.slots) != sorted(set(plan.slots)):
        raise PlanError(f"slots {plan.slots} are not in order or not distinct")


def _check_bundles(plan: MigrationPlan) -> None:
    """Bundles are of tensors of one form on both sides, and each tensor of a target family is in one of them."""
    bundled = [(bundle.target_family, tensor.key) for bundle in plan.bundles for tensor in bundle.tensors]
    wanted = [(family, tensor.key) for family, tensors in enumerate(plan.target.families) for tensor in tensors]
    if sorted(bundled) != sorted(wanted):
        lost = next(iter(set(wanted) ^ set(bundled)), bundled[0])
        raise PlanError("a tensor of the target is not in exactly one bundle", (), lost[1])
    forms = [{tensor.key: _form(tensor) for tensor in tensors} for tensors in plan.source.families]
    for bundle in plan.bundles:
        for tensor in bundle.tensors:
            for family in bundle.source_families:
                if forms[family].get(tensor.key) != _form(tensor):
                    raise PlanError("a tensor is read as another shape or dtype", (), tensor.key)
    _check_masters(plan)


def _check_masters(plan: MigrationPlan) -> None:
    """What is cast comes from tensors of the same shape that are not cast themselves."""
    by_family = [{tensor.key: tensor for tensor in tensors} for tensors in plan.target.families]
    for number in np.unique(plan.moves.bundle[plan.moves.round == CAST]).tolist():
        bundle = plan.bundles[number]
        for tensor in bundle.tensors:
            master = None
            if bundle.master_family is not None and tensor.derived_from is not None:
                master = by_family[bundle.master_family].get((tensor.derived_from, tensor.name))
            if master is None or master.shape != tensor.shape or master.derived_from is not None:
                raise PlanError("a tensor is cast from what it is not derived from", (), tensor.key)


def _form(tensor: object) -> tuple[object, ...]:
    return (tensor.shape, tensor.dtype, tensor.itemsize)  # type: ignore[attr-defined]


def _check_rows(plan: MigrationPlan) -> None:
    """Every move reads and writes rows that are there, of its own tensors, inside their boxes."""
    moves = plan.moves
    _refuse((moves.bundle < 0) | (moves.bundle >= len(plan.bundles)), "a move is of no bundle", plan, named=False)
    origin_rows = np.where(moves.is_relay, len(plan.target.rank), len(plan.source.rank))
    is_there = (moves.source_row >= 0) & (moves.source_row < origin_rows)
    is_there &= (moves.target_row >= 0) & (moves.target_row < len(plan.target.rank))
    _refuse(~is_there, "a move names a shard that is not there", plan, named=False)
    target_family = np.array([bundle.target_family for bundle in plan.bundles], dtype=np.int64)
    wrong = plan.target.family[moves.target_row] != target_family[moves.bundle]
    cast = np.flatnonzero(moves.round == CAST)
    master_family = np.array([-1 if b.master_family is None else b.master_family for b in plan.bundles], dtype=np.int64)
    wrong[cast] |= plan.target.family[moves.source_row[cast]] != master_family[moves.bundle[cast]]
    relay, direct = np.flatnonzero(moves.is_relay & (moves.round != CAST)), np.flatnonzero(~moves.is_relay)
    wrong[relay] |= plan.target.family[moves.source_row[relay]] != target_family[moves.bundle[relay]]
    allowed = {(number, family) for number, bundle in enumerate(plan.bundles) for family in bundle.source_families}
    pairs = np.column_stack([moves.bundle[direct], plan.source.family[moves.source_row[direct]]])
    kinds, which = np.unique(pairs, axis=0, return_inverse=True)
    wrong[direct] |= np.array([tuple(pair) not in allowed for pair in kinds.tolist()], dtype=bool)[which]
    _refuse(wrong, "a move reads another tensor", plan)
    _refuse((moves.lengths < 1).any(axis=1), "a move's box is empty", plan)
    for rows, table, what in (
        (moves.target_row, plan.target, "writes outside its target shard"),
        (np.where(moves.is_relay, 0, moves.source_row), plan.source, "reads outside its source shard"),
        (np.where(moves.is_relay, moves.source_row, 0), plan.target, "hands on what is outside its shard"),
    ):
        if not len(table.rank):
            continue
        inside = (moves.offsets >= table.offsets[rows]).all(axis=1)
        inside &= (moves.offsets + moves.lengths <= table.offsets[rows] + table.lengths[rows]).all(axis=1)
        if table is plan.source:
            inside |= moves.is_relay
        elif rows is not moves.target_row:
            inside |= ~moves.is_relay
        _refuse(~inside, f"a move {what}", plan)


def _check_ends(plan: MigrationPlan) -> None:
    """Local moves stay on a rank, others do not, and nothing is fetched that the rank's own slot holds."""
    moves = plan.moves
    src, dst = plan.ends
    is_local, is_wire = moves.round == LOCAL, moves.round >= 0
    _refuse(moves.round < CAST, "a move is of no round", plan)
    _refuse((moves.round == CAST) & ~(moves.is_relay & (src == dst)), "a cast is from another rank", plan)
    _refuse(is_local & (src != dst), "a move between two ranks is listed as local", plan)
    _refuse(is_local & moves.is_relay, "a move inside one rank is a relay", plan)
    _refuse(is_wire & (src == dst), "a move inside one rank is listed in a round", plan)
    wire = np.flatnonzero(is_wire)
    own = plan.source
    by_family = np.argsort(own.family, kind="stable")
    edges = np.searchsorted(own.family[by_family], np.arange(len(own.families) + 1))
    numbers = {families: number for number, families in enumerate({bundle.source_families for bundle in plan.bundles})}
    pairs = np.array([(n, f) for families, n in numbers.items() for f in families], dtype=np.int64).reshape(-1, 2)
    owner, place = ranges(edges[pairs[:, 1]], np.diff(edges)[pairs[:, 1]])
    row = by_family[place]
    number_of_bundle = np.array([numbers[bundle.source_families] for bundle in plan.bundles], dtype=np.int64)
    fetched, _, _ = join(
        BoxArray(number_of_bundle[moves.bundle[wire]] * len(own) + dst[wire], moves.offsets[wire], moves.lengths[wire]),
        BoxArray(pairs[owner, 0] * len(own) + own.rank[row], own.offsets[row], own.lengths[row]),
    )
    bad = np.zeros(len(moves), dtype=bool)
    bad[wire[fetched]] = True
    _refuse(bad, "a move fetches what the destination's own slot holds", plan)


def _written(plan: MigrationPlan) -> BoxArray:
    """The box of each move, grouped by what it writes: a row of the target, and a bundle."""
    moves = plan.moves
    return BoxArray(moves.target_row * len(plan.bundles) + moves.bundle, moves.offsets, moves.lengths)


def _check_written_once(plan: MigrationPlan) -> None:
    """Every element of every target shard is written, and none twice."""
    boxes = _written(plan)
    first, second, common = join(boxes, boxes)
    twice = np.flatnonzero(first < second)
    if len(twice):
        a, b = int(first[twice[0]]), int(second[twice[0]])
        src, dst = plan.ends
        raise PlanError(
            "elements are written twice",
            (int(src[a]), int(src[b]), int(dst[a])),
            _key(plan, a),
            _box(plan, a, common.offsets[twice[0]], common.lengths[twice[0]]),
        )
    bundles_of_family: dict[int, list[int]] = {}
    for number, bundle in enumerate(plan.bundles):
        bundles_of_family.setdefault(bundle.target_family, []).append(number)
    expected = [
        (row * len(plan.bundles) + bundle)
        for family, numbers in bundles_of_family.items()
        for bundle in numbers
        for row in np.flatnonzero(plan.target.family == family)
    ]
    # Disjoint boxes inside a shard with as many elements as the shard are the shard.
    groups = np.sort(np.array(expected, dtype=np.int64))
    written = np.zeros(len(groups), dtype=np.int64)
    np.add.at(written, np.searchsorted(groups, boxes.group), boxes.numel)
    wanted = plan.target.lengths.prod(axis=1)[groups // max(len(plan.bundles), 1)]
    short = np.flatnonzero(written != wanted)
    if len(short):
        row, number = divmod(int(groups[short[0]]), len(plan.bundles))
        tensor = plan.bundles[number].tensors[0]
        rest = [plan.target.box(row, len(tensor.shape))]
        for move in np.flatnonzero(boxes.group == groups[short[0]]).tolist():
            rest = subtract(rest, _box(plan, move, plan.moves.offsets[move], plan.moves.lengths[move]))
        count = int((wanted - written)[short[0]])
        raise PlanError(
            f"{count} elements are never written, the first here", (int(plan.target.rank[row]),), tensor.key, rest[0]
        )


def _check_relays(plan: MigrationPlan) -> None:
    """What a rank hands on has reached it in an earlier round, or was in its slot."""
    moves = plan.moves
    relays = np.flatnonzero(moves.is_relay & (moves.round != CAST))
    boxes = _written(plan)
    handed = BoxArray(
        moves.source_row[relays] * len(plan.bundles) + moves.bundle[relays],
        moves.offsets[relays],
        moves.lengths[relays],
    )
    relay, write, common = join(handed, boxes)
    in_time = (moves.round[write] != CAST) & (moves.round[write] < moves.round[relays[relay]])
    had = np.zeros(len(relays), dtype=np.int64)
    np.add.at(had, relay[in_time], common.numel[in_time])
    bad = np.zeros(len(moves), dtype=bool)
    bad[relays[had != handed.numel]] = True
    _refuse(bad, "a move hands on what its rank does not have yet", plan)


def _check_rounds(plan: MigrationPlan) -> None:
    src, dst = plan.ends
    wire = np.flatnonzero(plan.moves.round >= 0)
    for verb, end in (("sends", src), ("receives", dst)):
        cell, where = np.unique(end[wire] * plan.round_count + plan.moves.round[wire], return_inverse=True)
        total = np.zeros(len(cell), dtype=np.int64)
        np.add.at(total, where, plan.move_nbytes[wire])
        over = np.flatnonzero(total > plan.staging_nbytes)
        if len(over):
            rank, index = divmod(int(cell[over[0]]), plan.round_count)
            raise PlanError(
                f"in round {index} a rank {verb} {int(total[over[0]])} bytes, more than the {plan.staging_nbytes} of "
                f"staging",
                (rank,),
            )


def _refuse(bad: np.ndarray, reason: str, plan: MigrationPlan, *, named: bool = True) -> None:
    """Raise PlanError for the first move of which `bad` (bool [moves]) is true."""
    wrong: Iterable[int] = np.flatnonzero(bad).tolist()
    for row in wrong:
        if not named:
            raise PlanError(f"{reason}: row {row} of the table of moves")
        src, dst = plan.ends
        box = _box(plan, row, plan.moves.offsets[row], plan.moves.lengths[row])
        raise PlanError(reason, (int(src[row]), int(dst[row])), _key(plan, row), box)


def _key(plan: MigrationPlan, row: int) -> tuple[str, str]:
    return plan.bundles[plan.moves.bundle[row]].tensors[0].key


def _box(plan: MigrationPlan, row: int, offsets: np.ndarray, lengths: np.ndarray) -> Box:
    ndim = len(plan.bundles[plan.moves.bundle[row]].tensors[0].shape)
    return Box(tuple(offsets[:ndim].tolist()), tuple(lengths[:ndim].tolist()))
