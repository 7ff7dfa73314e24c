"""Assignment: which slot each rank of the next generation takes, so that most bytes are already in place.

First of all, groups that talk most stay whole inside nodes, and the ranks use as few nodes as that takes, so that a
node left idle can be given back. Under that, most bytes stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ray_etc.planners.exact import try_every_spread
from ray_etc.planners.overlap import Overlap
from ray_etc.planners.packing import pack

EXACT_UNITS = 8
EXACT_SLOTS = 32
"""Up to so many groups and slots every spread is tried: 3**8 = 6561 steps a node."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A slot for each rank.

    `nbytes_kept` need not move; no assignment under the same constraints keeps more than `nbytes_kept_bound`. The
    constraints are `groups_are_whole`, which says that each group has all of its slots on one node (where the slots
    do not allow that for all groups, they bind none), and that no fewer nodes would do. `idle_nodes` are those of
    which no slot is used, in the order of their lowest slots.
    """

    slot_of_rank: tuple[int, ...]
    nbytes_kept: int
    nbytes_kept_bound: int
    groups_are_whole: bool
    idle_nodes: tuple[str, ...]

    @property
    def is_optimal(self) -> bool:
        """It is proven that no other assignment under the same constraints keeps more."""
        return self.nbytes_kept == self.nbytes_kept_bound

    def in_words(self) -> str:
        """One sentence on the proof."""
        if self.is_optimal:
            return "proven optimal: no placement of the ranks keeps more in place"
        missed = self.nbytes_kept_bound - self.nbytes_kept
        return (
            f"may miss at most {missed} of {self.nbytes_kept_bound} bytes that could stay "
            f"({100 * missed / self.nbytes_kept_bound:.2g}%)"
        )


def assign(
    overlap: Overlap, slots: Sequence[int], nodes: Mapping[int, str], groups: Sequence[Sequence[int]]
) -> Assignment:
    """Give each rank a slot of its own: whole groups, then the fewest nodes, then most bytes in place.

    Column j of `overlap` is `slots[j]`, of which there may be more than ranks; a slot that must not be used is simply
    not among them. `nodes[slot]` is the node of each. Each of `groups` (lists of ranks, see
    ParallelConfig.tensor_groups) is kept inside one node; where the slots do not allow that for all groups, for none.

    Up to EXACT_UNITS groups on EXACT_SLOTS slots the result is the best of all, and among equally good ones the first
    in order, read from rank 0 on: a rank keeps the lowest slot. Beyond, groups are spread over nodes, then ranks over
    the slots of each node (see packing.pack), and all groups must have one size. The same input gives the same result.

    Raises ValueError where the arguments do not fit each other or there are fewer slots than ranks.
    """
    _check(overlap, slots, nodes, groups)
    order = sorted(range(len(slots)), key=lambda column: slots[column])
    ordered = [slots[column] for column in order]
    by_slot = overlap.on(np.array(order, dtype=np.int64))
    columns_of_node: dict[str, list[int]] = {}
    for column, slot in enumerate(ordered):
        columns_of_node.setdefault(nodes[slot], []).append(column)
    node_columns = list(columns_of_node.values())

    units = _units(groups, overlap.rank_count)
    found = _best(by_slot, units, node_columns)
    if found is None:
        found = _best(by_slot, [(rank,) for rank in range(overlap.rank_count)], node_columns)
    assert found is not None  # single ranks always fit
    columns, bound = found
    everyone = np.arange(overlap.rank_count)[:, None]
    kept = int(by_slot.blocks(everyone, columns[:, None]).sum())
    slot_of_rank = tuple(ordered[column] for column in columns)
    used = {nodes[slot] for slot in slot_of_rank}
    return Assignment(
        slot_of_rank,
        kept,
        kept if bound is None else bound,
        all(len({nodes[slot_of_rank[rank]] for rank in group}) <= 1 for group in groups),
        tuple(node for node in columns_of_node if node not in used),
    )


def _best(
    overlap: Overlap, units: Sequence[Sequence[int]], node_columns: Sequence[Sequence[int]]
) -> tuple[np.ndarray, int | None] | None:
    """(column of each rank, bound, None where it is reached), or None where whole units do not fit."""
    if len(units) <= EXACT_UNITS and overlap.slot_count <= EXACT_SLOTS:
        columns = try_every_spread(overlap.rows(np.arange(overlap.rank_count)), units, node_columns)
        return None if columns is None else (np.array(columns, dtype=np.int64), None)
    sizes = sorted({len(unit) for unit in units})
    if len(sizes) > 1:
        raise ValueError(
            f"groups of {sizes} ranks: {len(units)} groups on {overlap.slot_count} slots must have one size and hold "
            f"every rank; sizes may differ up to {EXACT_UNITS} groups on {EXACT_SLOTS} slots"
        )
    rooms = np.array([len(columns) // sizes[0] for columns in node_columns])
    if rooms.sum() < len(units):
        return None
    return pack(overlap, np.array(units, dtype=np.int64), [np.array(columns) for columns in node_columns])


def _check(overlap: Overlap, slots: Sequence[int], nodes: Mapping[int, str], groups: Sequence[Sequence[int]]) -> None:
    if overlap.slot_count != len(slots):
        raise ValueError(f"overlap with {overlap.slot_count} slots does not have one for each of {len(slots)} slots")
    rank_count = overlap.rank_count
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


def _units(groups: Sequence[Sequence[int]], rank_count: int) -> list[tuple[int, ...]]:
    """The groups, and each rank that is in none as a group of its own."""
    grouped = {rank for group in groups for rank in group}
    return [tuple(sorted(group)) for group in groups if group] + [
        (rank,) for rank in range(rank_count) if rank not in grouped
    ]
