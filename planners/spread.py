"""Groups of ranks over nodes, one group a seat, so that the groups keep the most bytes.

What a group keeps on a node is found once for each pair of types, since replicas make most groups and most nodes
alike. State that has few types (weights, which every replica holds) makes a value for every pair of types; state that
is different on every rank (ZeRO-1) makes a few single pairs worth more than their types. Both together are a matching
in a sparse graph with prices of types.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components, min_weight_full_bipartite_matching

from ray_etc.planners.overlap import Overlap, Part
from ray_etc.planners.transport import transport

TYPE_PAIRS = 4096
"""Up to so many pairs of a type of groups and a type of nodes are valued all."""
REPLICA_PAIRS = 2**17
"""The same where nodes are at least two of a type: 16 stages of 64 expert-parallel ranks on nodes of 8. Priced one by
one, nodes that hold the same would all seem worth having for the same few ranks."""
PRICE_ROUNDS = 8
DENSE_PAIRS = 2**22
"""Where prices do not prove the result, up to so many pairs of a group and a seat are solved as a dense matrix."""
BATCH_ENTRIES = 2**22
BATCH_ROWS = 1024


@dataclass(frozen=True)
class Worth:
    """What each group would keep on each node, were it alone there.

    Group i on node j is worth `of_types[type_of_group[i], type_of_node[j]]`, but for the pairs (`group`, `node`),
    each listed once, which are worth `nbytes` instead, and that is no less. All arrays are int64.
    """

    type_of_group: np.ndarray
    type_of_node: np.ndarray
    of_types: np.ndarray
    group: np.ndarray
    node: np.ndarray
    nbytes: np.ndarray

    def most_gained(self, room: np.ndarray) -> np.ndarray:
        """int64 [nodes]: more than this `room[j]` groups on node j are not worth beyond what their types are."""
        more = self.nbytes - self.of_types[self.type_of_group[self.group], self.type_of_node[self.node]]
        order = np.lexsort((-more, self.node))
        node, more = self.node[order], more[order]
        is_among_best = np.arange(len(node)) - np.searchsorted(node, node) < room[node]
        most = np.zeros(len(room), dtype=np.int64)
        np.add.at(most, node[is_among_best], more[is_among_best])
        return most


def worth_of(overlap: Overlap, groups: np.ndarray, nodes: np.ndarray) -> Worth:
    """What ranks `groups` (int64 [groups, size]) keep on slots `nodes` (int64 [nodes, slots], -1 for none)."""
    common: list[Part] = []
    single: list[Part] = []
    type_of_group, type_of_node = np.zeros(len(groups), dtype=np.int64), np.zeros(len(nodes), dtype=np.int64)
    for part in sorted(overlap.parts, key=lambda part: part.nbytes.shape[0] * part.nbytes.shape[1]):
        wanted = _types(np.column_stack([type_of_group, part.class_of_rank[groups]]))
        class_of_slot = np.where(nodes < 0, -1, part.class_of_slot[nodes])
        held = _types(np.column_stack([type_of_node, class_of_slot]))
        held_types = int(held.max(initial=0)) + 1
        are_replicas = 2 * held_types <= np.count_nonzero((class_of_slot >= 0).any(axis=1))
        most = REPLICA_PAIRS if are_replicas else TYPE_PAIRS
        if (wanted.max(initial=0) + 1) * held_types <= most:
            type_of_group, type_of_node = wanted, held
            common.append(part)
        else:
            single.append(part)
    group_types, first_group = np.unique(type_of_group, return_index=True)
    node_types, first_node = np.unique(type_of_node, return_index=True)
    of_types = np.zeros((len(group_types), len(node_types)), dtype=np.int64)
    if common:
        pairs = np.indices(of_types.shape).reshape(2, -1)
        of_types = fit(Overlap(common), groups[first_group[pairs[0]]], nodes[first_node[pairs[1]]])[1]
        of_types = of_types.reshape(len(group_types), len(node_types))
    group, node = _touching(single, groups, nodes)
    _, nbytes = fit(overlap, groups[group], nodes[node])
    return Worth(type_of_group, type_of_node, of_types, group, node, nbytes)


def _types(patterns: np.ndarray) -> np.ndarray:
    """The number of the type of each row: equal rows are one type."""
    _, inverse = np.unique(patterns, axis=0, return_inverse=True)
    return inverse.reshape(-1)


def _touching(parts: list[Part], groups: np.ndarray, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pairs (group, node) of which the group finds something of `parts` on the node, in order."""
    total = csr_array((len(groups), len(nodes)), dtype=np.int64)
    for part in parts:
        wanted, held = part.nbytes.shape
        classes = part.class_of_rank[groups].ravel()
        rows = np.repeat(np.arange(len(groups)), groups.shape[1])
        of_group = csr_array((np.ones(len(classes), dtype=np.int64), (rows, classes)), shape=(len(groups), wanted))
        where, column = np.nonzero(nodes >= 0)
        classes = part.class_of_slot[nodes[where, column]]
        where, classes = where[classes >= 0], classes[classes >= 0]
        of_node = csr_array((np.ones(len(classes), dtype=np.int64), (classes, where)), shape=(held, len(nodes)))
        pattern = csr_array((part.nbytes > 0).astype(np.int64))
        total = total + of_group @ pattern @ of_node
    total.sum_duplicates()
    group, node = total.nonzero()
    order = np.lexsort((node, group))
    return group[order].astype(np.int64), node[order].astype(np.int64)


def fit(overlap: Overlap, ranks: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best places of ranks [n, a] among slots [n, b >= a], -1 for none: (columns [n, a], bytes kept [n])."""
    columns, kept = np.zeros(ranks.shape, dtype=np.int64), np.zeros(len(ranks), dtype=np.int64)
    batch = max(1, BATCH_ENTRIES // max(1, ranks.shape[1] * slots.shape[1]))
    for first in range(0, len(ranks), batch):
        here = slots[first : first + batch]
        blocks = overlap.blocks(ranks[first : first + batch], here)
        # No rank goes where there is no slot: there are enough others, all worth more than -1.
        blocks[np.broadcast_to((here < 0)[:, None, :], blocks.shape)] = -1
        likes = blocks.argmax(axis=2)
        in_order = np.sort(likes, axis=1)
        for index in np.flatnonzero((in_order[:, 1:] == in_order[:, :-1]).any(axis=1)):
            _, likes[index] = linear_sum_assignment(blocks[index], maximize=True)
        columns[first : first + batch] = likes
        kept[first : first + batch] = np.take_along_axis(blocks, likes[:, :, None], axis=2).sum(axis=(1, 2))
    return columns, kept


def best_spread(worth: Worth, room: np.ndarray) -> tuple[np.ndarray, int]:
    """The node of each group (int64 [groups], -1 where none is worth anything), and the most that can be kept.

    `room[j]` groups at most go to node j, each worth there what it is alone. Prices of types, u and v, with
    u[a] + v[b] >= of_types[a, b], leave each single pair the gain nbytes - u - v. Whatever the prices, supply @ u +
    room @ v + the best matching of gains is a bound; prices whose types the rest of the groups can be sent to without
    loss prove the matching. So prices are made of what the matching leaves, and again, until bound and value meet.
    """
    groups, types = len(worth.type_of_group), worth.of_types.shape
    supply = np.bincount(worth.type_of_group, minlength=types[0])
    places = np.bincount(worth.type_of_node, weights=room, minlength=types[1]).astype(np.int64)
    flow, of_kind, of_place = transport(worth.of_types, supply, places)
    best, bound = -1, 2**62
    node_of_group = np.full(groups, -1, dtype=np.int64)
    for _ in range(PRICE_ROUNDS):
        gain = worth.nbytes - of_kind[worth.type_of_group[worth.group]] - of_place[worth.type_of_node[worth.node]]
        pairs = _best_gains(worth.group, worth.node, gain, room)
        bound = min(bound, int(supply @ of_kind + places @ of_place + gain[pairs].sum()))
        group, node = worth.group[pairs], worth.node[pairs]
        rest = supply - np.bincount(worth.type_of_group[group], minlength=types[0])
        rest_places = places - np.bincount(worth.type_of_node[node], minlength=types[1])
        flow, of_kind, of_place = transport(worth.of_types, rest, rest_places)
        value = int(worth.nbytes[pairs].sum() + (flow * worth.of_types).sum())
        if value > best:
            best, node_of_group = value, _expand(worth, room, group, node, flow)
        if best == bound:
            return node_of_group, bound
    if groups * int(room.sum()) <= DENSE_PAIRS:
        return _dense(worth, room)
    return node_of_group, bound


def _best_gains(group: np.ndarray, node: np.ndarray, gain: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Positions of the pairs of a matching with the largest sum of gains; each group once, node j `room[j]` times."""
    useful = np.flatnonzero((gain > 0) & (room[node] > 0))
    if not len(useful):
        return useful
    copies = np.minimum(room, np.bincount(node[useful], minlength=len(room)))[node[useful]]
    position = np.repeat(useful, copies)
    first_seat = np.concatenate([[0], np.cumsum(room)])
    within = np.arange(len(position)) - np.repeat(np.cumsum(copies) - copies, copies)
    rows, row = np.unique(group[position], return_inverse=True)
    seats, column = np.unique(first_seat[node[position]] + within, return_inverse=True)
    graph = coo_array((np.ones(len(row)), (row, len(rows) + column)), shape=(len(rows) + len(seats),) * 2)
    _, component = connected_components(graph, directed=False)
    chosen: list[np.ndarray] = []
    # The solver's work grows with rows times entries, so parts that share nothing are solved apart, many at a time.
    order = np.argsort(component[row], kind="stable")
    starts = np.flatnonzero(np.diff(component[row][order], prepend=-1))
    batch: list[int] = []
    for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
        batch.append(int(start))
        if stop - batch[0] >= BATCH_ROWS or stop == len(order):
            part = order[batch[0] : stop]
            chosen.append(position[part[_matching(row[part], column[part], gain[position[part]])]])
            batch = []
    return np.sort(np.concatenate(chosen))


def _matching(row: np.ndarray, column: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """Positions of the entries of the best matching; each row may also stay out. Exact below 2**53."""
    rows, row = np.unique(row, return_inverse=True)
    columns, column = np.unique(column, return_inverse=True)
    out = np.arange(len(rows))
    # A cost of 0 would be no entry, hence the 1.
    cost = np.concatenate([gain.max() - gain, np.full(len(rows), gain.max())]) + 1.0
    where = (np.concatenate([row, out]), np.concatenate([column, len(columns) + out]))
    matrix = csr_array((cost, where), shape=(len(rows), len(columns) + len(rows)))
    chosen_row, chosen_column = min_weight_full_bipartite_matching(matrix)
    is_in = chosen_column < len(columns)
    key = row * len(columns) + column
    order = np.argsort(key)
    return order[np.searchsorted(key[order], chosen_row[is_in] * len(columns) + chosen_column[is_in].astype(np.int64))]


def _expand(worth: Worth, room: np.ndarray, group: np.ndarray, node: np.ndarray, flow: np.ndarray) -> np.ndarray:
    """The node of each group: `group` on `node`, the others as `flow` sends their types, the lowest first."""
    node_of_group = np.full(len(worth.type_of_group), -1, dtype=np.int64)
    node_of_group[group] = node
    left = room - np.bincount(node, minlength=len(room))
    waiting = [np.flatnonzero((worth.type_of_group == kind) & (node_of_group < 0)) for kind in range(len(flow))]
    seats = [np.repeat(of, left[of]) for of in (np.flatnonzero(worth.type_of_node == k) for k in range(flow.shape[1]))]
    for kind, place in zip(*np.nonzero(flow), strict=True):
        if worth.of_types[kind, place]:
            count = int(flow[kind, place])
            node_of_group[waiting[kind][:count]] = seats[place][:count]
            waiting[kind], seats[place] = waiting[kind][count:], seats[place][count:]
    return node_of_group


def _dense(worth: Worth, room: np.ndarray) -> tuple[np.ndarray, int]:
    """The same by the dense matrix of groups and seats."""
    matrix = worth.of_types[worth.type_of_group][:, worth.type_of_node]
    matrix[worth.group, worth.node] = worth.nbytes
    seats = np.repeat(np.arange(len(room)), room)
    row, column = linear_sum_assignment(matrix[:, seats], maximize=True)
    node_of_group = np.full(len(matrix), -1, dtype=np.int64)
    node_of_group[row] = seats[column]
    kept = matrix[row, seats[column]]
    node_of_group[row[kept == 0]] = -1
    return node_of_group, int(kept.sum())
