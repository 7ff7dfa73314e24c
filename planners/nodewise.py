"""Placement of thousands of ranks: tensor-parallel groups over nodes first, then ranks inside each node.

The exact search of `assign` is for few groups. Here all groups have one size and all nodes have one size, so the
choice of nodes is an assignment problem of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.optimize import linear_sum_assignment, linprog
from scipy.sparse import coo_array, csr_array, vstack

EXACT_SLOTS = 2048
"""Up to so many slots the bound is the best of all placements; beyond, see Overlap.bound."""

SWAPPED_GROUPS = 64
"""Up to so many groups, exchanges of their nodes are tried where the bound is not reached: some 4000 a round."""


class Overlap:
    """Bytes that each new rank finds on each slot: sparse, and looked up in rows.

    Each of `parts` is (overlap, class_of_rank, class_of_slot): sparse int64 [classes wanted, classes held], the class
    of each new rank, and the class of each slot, -1 where the slot holds nothing.
    """

    def __init__(self, parts: Sequence[tuple[csr_array, np.ndarray, np.ndarray]]) -> None:
        self._parts = parts
        self.rank_count = len(parts[0][1])
        self.slot_count = len(parts[0][2])
        self._nbytes = csr_array((self.rank_count, self.slot_count), dtype=np.int64)
        for overlap, class_of_rank, class_of_slot in parts:
            classes, held = overlap.shape
            wider = csr_array((overlap.data, overlap.indices, overlap.indptr), shape=(classes, held + 1))
            self._nbytes += wider[:, np.where(class_of_slot < 0, held, class_of_slot)][class_of_rank]

    def rows(self, ranks: np.ndarray) -> np.ndarray:
        """Bytes of some ranks: int64 [len(ranks), slots]."""
        return self._nbytes[ranks].toarray()

    def bound(self) -> int:
        """Bytes that no placement of ranks on slots of their own can exceed.

        For each part alone, classes of ranks on classes of slots are a transport problem, solved by HiGHS. Its dual
        prices make the bound, in whole bytes whatever its tolerance: each slot of class j at price v[j] >= 0, each
        rank at the best profit that any class of slots leaves it.
        """
        total = 0
        for overlap, class_of_rank, class_of_slot in self._parts:
            ranks = np.bincount(class_of_rank, minlength=overlap.shape[0])
            slots = np.bincount(class_of_slot[class_of_slot >= 0], minlength=overlap.shape[1])
            pairs = overlap.multiply(slots > 0).tocoo()
            pairs.eliminate_zeros()
            if not pairs.nnz:
                continue
            scale = float(pairs.data.max())
            entry, ones = np.arange(pairs.nnz), np.ones(pairs.nnz)
            limits = vstack(
                [
                    coo_array((ones, (where, entry)), shape=(n, pairs.nnz))
                    for where, n in zip(pairs.coords, overlap.shape, strict=True)
                ]
            )
            solution = linprog(-pairs.data / scale, limits.tocsr(), np.concatenate([ranks, slots]), method="highs-ds")
            prices = np.rint(-solution.ineqlin.marginals[overlap.shape[0] :] * scale).astype(np.int64)
            prices = np.maximum(prices, 0)
            profit = np.zeros(overlap.shape[0], dtype=np.int64)
            np.maximum.at(profit, pairs.coords[0], pairs.data - prices[pairs.coords[1]])
            total += int(ranks @ profit + slots @ prices)
        return total

    def unmoved(self) -> int:
        """Bytes that stay if rank i takes slot i."""
        return int(self._nbytes.diagonal().sum())


@dataclass(frozen=True)
class WholeGroups:
    """A slot for each rank (int64 [ranks]) with every tensor-parallel group on one node, and the bytes that stay.

    `nbytes_kept_bound` is what no placement can exceed, whole groups or not; `nbytes_kept_unmoved` what would stay if
    rank i took slot i.
    """

    slot_of_rank: np.ndarray
    nbytes_kept: int
    nbytes_kept_bound: int
    nbytes_kept_unmoved: int


def place_whole_groups(overlap: Overlap, group_size: int, node_size: int) -> WholeGroups:
    """Place ranks, of which each `group_size` in a row stay on one node, where they find the most bytes.

    Slots are numbered node by node, `node_size` a node. First each group gets a node, by what it would keep there
    beside those that chose before; then the ranks of each node get their slots, exactly. Up to SWAPPED_GROUPS groups,
    nodes are then exchanged while that helps. The choice of nodes may miss the best; `nbytes_kept_bound` says by how
    much at most. The same input gives the same placement.

    Raises ValueError, with the numbers, where the groups do not fit.
    """
    group_count, node_count = overlap.rank_count // group_size, overlap.slot_count // node_size
    room = node_size // group_size
    if group_count > room * node_count:
        raise ValueError(
            f"{group_count} tensor-parallel groups of {group_size} do not fit on {node_count} nodes of {node_size} "
            f"slots, {room} a node: {room * node_count} fit"
        )
    everything = np.arange(overlap.rank_count)
    alone = sum(int(overlap.rows(part).max(axis=1).sum()) for part in np.array_split(everything, group_count))
    unmoved = overlap.unmoved()
    slot_of_rank, kept = _fill(overlap, _spread(overlap, group_size, node_size), group_size, node_size)
    bound = alone
    if kept < alone and overlap.slot_count <= EXACT_SLOTS:
        rows = overlap.rows(everything)
        _, free = linear_sum_assignment(rows, maximize=True)
        bound = int(rows[everything, free].sum())
        if kept < bound and ((nodes := free.reshape(-1, group_size) // node_size) == nodes[:, :1]).all():
            slot_of_rank, kept = free, bound
        elif kept < bound and group_count <= SWAPPED_GROUPS:
            better = _swap(rows, slot_of_rank[::group_size] // node_size, group_size, node_size)
            slot_of_rank, kept = _fill(overlap, better, group_size, node_size)
    elif kept < alone:
        bound = min(alone, overlap.bound())
    return WholeGroups(slot_of_rank, kept, bound, unmoved)


def _fill(overlap: Overlap, node_of_group: np.ndarray, group_size: int, node_size: int) -> tuple[np.ndarray, int]:
    """The best slot of each rank (int64 [ranks]) inside the nodes that the groups have, and the bytes kept."""
    slot_of_rank = np.full(overlap.rank_count, -1, dtype=np.int64)
    kept = 0
    for node in np.unique(node_of_group):
        ranks = _ranks(np.flatnonzero(node_of_group == node), group_size)
        part = overlap.rows(ranks)[:, node * node_size : (node + 1) * node_size]
        row, column = linear_sum_assignment(part, maximize=True)
        slot_of_rank[ranks[row]] = node * node_size + column
        kept += int(part[row, column].sum())
    return slot_of_rank, kept


def _swap(rows: np.ndarray, node_of_group: np.ndarray, group_size: int, node_size: int) -> np.ndarray:
    """Exchange the nodes of two groups, or move one to a free place, as long as that keeps more."""
    node_count = rows.shape[1] // node_size
    members = [set(np.flatnonzero(node_of_group == node).tolist()) for node in range(node_count)]

    @cache
    def worth(node: int, groups: frozenset[int]) -> int:
        part = rows[_ranks(np.array(sorted(groups), dtype=np.int64), group_size)]
        part = part[:, node * node_size : (node + 1) * node_size]
        return int(part[linear_sum_assignment(part, maximize=True)].sum())

    def exchange(one: int, other: int) -> bool:
        """The first exchange between two nodes that keeps more; False where there is none."""
        here, there = frozenset(members[one]), frozenset(members[other])
        now = worth(one, here) + worth(other, there)
        places = [frozenset({group}) for group in sorted(there)]
        if len(there) < node_size // group_size:
            places.append(frozenset())
        for out in sorted(here):
            for back in places:
                new_here, new_there = here - {out} | back, there - back | {out}
                if worth(one, new_here) + worth(other, new_there) > now:
                    members[one], members[other] = set(new_here), set(new_there)
                    return True
        return False

    while any(exchange(one, other) for one in range(node_count) for other in range(node_count) if one != other):
        pass
    better = node_of_group.copy()
    for node, groups in enumerate(members):
        better[sorted(groups)] = node
    return better


def _spread(overlap: Overlap, group_size: int, node_size: int) -> np.ndarray:
    """The node of each group, int64 [groups].

    In turns, each node takes at most one group a turn, all turns' groups together by an assignment problem. Between
    turns the slots that a group took are no longer worth anything to the others. Groups that would keep nothing
    anywhere fill the first nodes with room.
    """
    node_count = overlap.slot_count // node_size
    node_of_group = np.full(overlap.rank_count // group_size, -1, dtype=np.int64)
    room = np.full(node_count, node_size // group_size)
    is_free = np.ones(overlap.slot_count, dtype=bool)
    while True:
        left, open_nodes = np.flatnonzero(node_of_group < 0), np.flatnonzero(room)
        worth = np.zeros((len(left), node_count), dtype=np.int64)
        for index, group in enumerate(left):
            rows = overlap.rows(_ranks(np.array([group]), group_size)) * is_free
            worth[index] = _worth(rows.reshape(group_size, node_count, node_size))
        worth = worth[:, open_nodes]
        pairs = [pair for pair in zip(*linear_sum_assignment(worth, maximize=True), strict=True) if worth[pair]]
        if not pairs:
            break
        for index, column in pairs:
            group, node = left[index], open_nodes[column]
            node_of_group[group] = node
            room[node] -= 1
            slots = np.arange(node * node_size, (node + 1) * node_size)
            part = overlap.rows(_ranks(np.array([group]), group_size))[:, slots] * is_free[slots]
            row, taken = linear_sum_assignment(part, maximize=True)
            is_free[slots[taken[part[row, taken] > 0]]] = False
    seats = np.repeat(np.arange(node_count), room)
    node_of_group[node_of_group < 0] = seats[: np.count_nonzero(node_of_group < 0)]
    return node_of_group


def _ranks(groups: np.ndarray, group_size: int) -> np.ndarray:
    return (groups[:, None] * group_size + np.arange(group_size)).ravel()


def _worth(blocks: np.ndarray) -> np.ndarray:
    """What a group would keep on each node: int64 [nodes], from [ranks of the group, nodes, slots of a node]."""
    by_node = np.ascontiguousarray(blocks.transpose(1, 0, 2))
    worth = np.zeros(len(by_node), dtype=np.int64)
    known: dict[bytes, int] = {}  # replicas make most nodes alike
    for node in np.flatnonzero(by_node.any(axis=(1, 2))):
        block = by_node[node]
        key = block.tobytes()
        if key not in known:
            known[key] = int(block[linear_sum_assignment(block, maximize=True)].sum())
        worth[node] = known[key]
    return worth
