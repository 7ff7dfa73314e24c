"""Placement of thousands of ranks: tensor-parallel groups over nodes first, then ranks inside each node.

The exact search of `assign` is for few groups. Here all groups have one size and all nodes have one size, so the
choice of nodes is an assignment problem of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment, linprog
from scipy.sparse import coo_array, csr_array, vstack

EXACT_SLOTS = 2048
"""Up to so many slots the bound is the best of all placements; beyond, see Overlap.bound."""


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
    beside those that chose before; then the ranks of each node get their slots, exactly. The first step may miss the
    best; `nbytes_kept_bound` says by how much at most. The same input gives the same placement.

    Raises ValueError, with the numbers, where the groups do not fit.
    """
    group_count, node_count = overlap.rank_count // group_size, overlap.slot_count // node_size
    room = node_size // group_size
    if group_count > room * node_count:
        raise ValueError(
            f"{group_count} tensor-parallel groups of {group_size} do not fit on {node_count} nodes of {node_size} "
            f"slots, {room} a node: {room * node_count} fit"
        )
    node_of_group = _spread(overlap, group_size, node_size)
    slot_of_rank = np.full(overlap.rank_count, -1, dtype=np.int64)
    kept = alone = unmoved = 0
    for node in np.unique(node_of_group):
        ranks = _ranks(np.flatnonzero(node_of_group == node), group_size)
        rows = overlap.rows(ranks)
        part = rows[:, node * node_size : (node + 1) * node_size]
        row, column = linear_sum_assignment(part, maximize=True)
        slot_of_rank[ranks[row]] = node * node_size + column
        kept += int(part[row, column].sum())
        alone += int(rows.max(axis=1).sum())
        unmoved += int(rows[np.arange(len(ranks)), ranks].sum())
    bound = alone
    if kept < alone:
        if overlap.slot_count <= EXACT_SLOTS:
            everything = overlap.rows(np.arange(overlap.rank_count))
            bound = int(everything[linear_sum_assignment(everything, maximize=True)].sum())
        else:
            bound = min(alone, overlap.bound())
    return WholeGroups(slot_of_rank, kept, bound, unmoved)


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
