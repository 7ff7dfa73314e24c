"""Assignment: which slot each rank of the next generation takes, so that most bytes are already in place.

Tensor-parallel groups talk most, so a group stays inside one node wherever the slots allow that for all groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linear_sum_assignment, milp

from ray_etc.planners.matching import best_matching
from ray_etc.planners.overlap import overlap_nbytes

__all__ = ["Assignment", "assign", "overlap_nbytes"]

Pairs = tuple[tuple[int, int], ...]
"""(rank, column) for each rank of a set, in the order of ranks."""

EXACT_GROUPS = 8
"""Up to so many groups every way to spread them over nodes is tried: 3**8 = 6561 steps a node."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A slot for each rank.

    `nbytes_kept` need not move. `is_optimal` says that no other assignment under the same constraint keeps more;
    `groups_are_whole` that each group has all of its slots on one node.
    """

    slot_of_rank: tuple[int, ...]
    nbytes_kept: int
    is_optimal: bool
    groups_are_whole: bool


def assign(
    overlap: np.ndarray, slots: Sequence[int], nodes: Mapping[int, str], groups: Sequence[Sequence[int]]
) -> Assignment:
    """Give each rank a slot of its own so that the most bytes stay in place.

    `overlap[rank, column]` is in bytes, column by column for `slots`, of which there may be more than ranks;
    `nodes[slot]` is the node of each. Each of `groups` (lists of ranks, see ParallelConfig.tensor_groups) is kept
    inside one node; where the slots do not allow that for all groups, for none.

    Among equally good assignments the one is taken that is first in order, read from rank 0 on: a rank keeps the
    lowest slot. With more than EXACT_GROUPS groups that must be kept whole, groups are first spread over nodes by
    what each would keep there on its own, then placed inside each node; `is_optimal` then says whether the result
    reached the bound that the unconstrained problem sets.

    Raises ValueError where the arguments do not fit each other or there are fewer slots than ranks.
    """
    rank_count = _check(overlap, slots, nodes, groups)
    order = sorted(range(len(slots)), key=lambda column: slots[column])
    by_slot = np.asarray(overlap, dtype=np.int64)[:, order]
    ordered = [slots[column] for column in order]
    node_of_column = [nodes[slot] for slot in ordered]

    def result(columns: Sequence[int], *, is_optimal: bool) -> Assignment:
        return Assignment(
            tuple(ordered[column] for column in columns),
            int(sum(by_slot[rank, column] for rank, column in enumerate(columns))),
            is_optimal,
            all(len({node_of_column[columns[rank]] for rank in group}) <= 1 for group in groups),
        )

    free = result(best_matching(by_slot), is_optimal=True)
    if free.groups_are_whole:
        return free
    units = _units(groups, rank_count)
    columns_of_node: dict[str, list[int]] = {}
    for column, node in enumerate(node_of_column):
        columns_of_node.setdefault(node, []).append(column)
    node_columns = list(columns_of_node.values())
    if len(units) <= EXACT_GROUPS:
        columns = _try_every_spread(by_slot, units, node_columns)
        return free if columns is None else result(columns, is_optimal=True)
    columns = _node_level_first(by_slot, units, node_columns)
    if columns is None:
        return free
    whole = result(columns, is_optimal=False)
    return result(columns, is_optimal=whole.nbytes_kept == free.nbytes_kept)


def _check(overlap: np.ndarray, slots: Sequence[int], nodes: Mapping[int, str], groups: Sequence[Sequence[int]]) -> int:
    """The number of ranks, once the arguments are known to fit each other."""
    if overlap.ndim != 2 or overlap.shape[1] != len(slots):
        raise ValueError(f"overlap of shape {overlap.shape} does not have one column for each of {len(slots)} slots")
    rank_count = overlap.shape[0]
    if rank_count > len(slots):
        raise ValueError(f"{rank_count} ranks need as many slots, there are {len(slots)}")
    if len(set(slots)) != len(slots):
        raise ValueError(f"slots {list(slots)} name a slot twice")
    homeless = [slot for slot in slots if slot not in nodes]
    if homeless:
        raise ValueError(f"no node is given for slots {homeless}")
    members = [rank for group in groups for rank in group]
    if len(set(members)) != len(members) or not all(0 <= rank < rank_count for rank in members):
        raise ValueError(
            f"groups {[list(group) for group in groups]} are not disjoint sets of ranks below {rank_count}"
        )
    return rank_count


def _units(groups: Sequence[Sequence[int]], rank_count: int) -> list[tuple[int, ...]]:
    """The groups, and each rank that is in none as a group of its own."""
    grouped = {rank for group in groups for rank in group}
    return [tuple(sorted(group)) for group in groups if group] + [
        (rank,) for rank in range(rank_count) if rank not in grouped
    ]


def _place(overlap: np.ndarray, ranks: Iterable[int], columns: Sequence[int]) -> tuple[int, Pairs]:
    """The best of `ranks` on `columns` of one node, with the bytes kept."""
    rows = sorted(ranks)
    part = overlap[np.ix_(rows, columns)]
    chosen = best_matching(part)
    kept = int(part[range(len(rows)), chosen].sum())
    return kept, tuple((rank, columns[column]) for rank, column in zip(rows, chosen, strict=True))


def _try_every_spread(
    overlap: np.ndarray, units: Sequence[tuple[int, ...]], node_columns: Sequence[Sequence[int]]
) -> list[int] | None:
    """The exact best with whole units, or None where they do not fit.

    Nodes are taken one by one. For each set of units placed so far only the best is kept: most bytes, then first
    in order. What a node adds does not depend on how the units before it were placed, so the best of each set is
    part of the best of all.
    """
    best: dict[int, tuple[int, Pairs]] = {0: (0, ())}
    everything = (1 << len(units)) - 1
    for columns in node_columns:
        placed: dict[int, tuple[int, Pairs]] = {}
        for chosen in range(everything + 1):
            ranks = [rank for index, unit in enumerate(units) if chosen >> index & 1 for rank in unit]
            if len(ranks) <= len(columns):
                placed[chosen] = _place(overlap, ranks, columns)
        after: dict[int, tuple[int, Pairs]] = {}
        for done, (kept, pairs) in best.items():
            for chosen, (more, new_pairs) in placed.items():
                if done & chosen:
                    continue
                candidate = (kept + more, tuple(sorted(pairs + new_pairs)))
                rival = after.get(done | chosen)
                if rival is None or (-candidate[0], candidate[1]) < (-rival[0], rival[1]):
                    after[done | chosen] = candidate
        best = after
    return [column for _, column in best[everything][1]] if everything in best else None


def _node_level_first(
    overlap: np.ndarray, units: Sequence[tuple[int, ...]], node_columns: Sequence[Sequence[int]]
) -> list[int] | None:
    """Spread whole units over nodes, then ranks inside each node; None where the units do not fit.

    The spread is a small integer program (HiGHS): variable [unit, node] is 1 where the unit goes to the node, worth
    what the unit would keep there if it were alone.
    """
    worth = np.zeros((len(units), len(node_columns)))
    for index, unit in enumerate(units):
        for node, columns in enumerate(node_columns):
            if len(unit) <= len(columns):
                part = overlap[np.ix_(unit, columns)]
                worth[index, node] = part[linear_sum_assignment(part, maximize=True)].sum()
    sizes = np.array([len(unit) for unit in units])
    each_unit_once = np.kron(np.eye(len(units)), np.ones(len(node_columns)))
    slots_used = np.kron(sizes, np.eye(len(node_columns)))
    solution = milp(
        -worth.ravel() / max(1.0, worth.max()),
        integrality=np.ones(worth.size),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(each_unit_once, 1, 1),
            LinearConstraint(slots_used, 0, [len(columns) for columns in node_columns]),
        ],
    )
    if solution.x is None:
        return None
    node_of_unit = solution.x.reshape(worth.shape).argmax(axis=1)
    pairs: list[tuple[int, int]] = []
    for node, columns in enumerate(node_columns):
        here = [rank for unit, place in zip(units, node_of_unit, strict=True) if place == node for rank in unit]
        pairs.extend(_place(overlap, here, columns)[1])
    return [column for _, column in sorted(pairs)]
