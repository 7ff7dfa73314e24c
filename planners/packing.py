"""Whole groups onto the fewest nodes: which nodes, which group on which, then which rank on which slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import block_array, coo_array, csr_array, eye_array

from ray_etc.planners.overlap import Overlap
from ray_etc.planners.spread import Worth, best_spread, fit, worth_of

SWEEPS = 4
"""How often each seat of every node is filled anew; mostly the second time gains nothing and is the last."""
SEARCH_NODES = 200
"""Where the search for the nodes to use is given up: a count, not a time, so that the result is always the same."""


def fewest_nodes(rooms: np.ndarray, groups: int) -> int:
    """How many nodes it takes for `groups` groups where node j has room for `rooms[j]`."""
    return int(np.searchsorted(np.cumsum(np.sort(rooms)[::-1]), groups)) + 1 if groups else 0


def pack(overlap: Overlap, groups: np.ndarray, nodes: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
    """The slot of each rank (int64 [ranks]), and the most bytes that any such placement keeps.

    `groups` is int64 [groups, size], every rank once; `nodes` are the slots of each, and must have room for all groups
    whole. No more nodes are used than that takes.

    Where nodes have room for one group, and where groups are single ranks and all nodes are needed, what groups keep
    adds up: the spread is exact as far as its prices prove. Elsewhere groups of one node want the same slots, and
    which nodes to use comes first; the bound is then the least of several, each of which leaves one of these out.
    """
    size = groups.shape[1]
    rooms = np.array([len(node) // size for node in nodes])
    # A node so small that even the largest others beside it are too few is out of the question.
    others = np.sort(rooms)[::-1][: fewest_nodes(rooms, len(groups)) - 1].sum()
    usable = np.flatnonzero(others + rooms >= len(groups))
    nodes, rooms = [nodes[index] for index in usable.tolist()], rooms[usable]
    table = np.full((len(nodes), max(map(len, nodes))), -1, dtype=np.int64)
    for row, node in zip(table, nodes, strict=True):
        row[: len(node)] = node
    is_choice = rooms.max() > 1 and fewest_nodes(rooms, len(groups)) < len(nodes)
    bound = 2**62
    if is_choice or size > 1:
        worth = worth_of(overlap, groups, table)
        node_of_group, bound = best_spread(worth, rooms)
        if rooms.max() == 1:
            return _seated(overlap, groups, table, _fill(node_of_group, rooms))[0], bound
        if is_choice:
            chosen, limit = _choose(worth, rooms, len(groups))
            bound, table, rooms = min(bound, limit), table[chosen], rooms[chosen]
    slots = table[table >= 0]
    if size == 1:
        slots = np.sort(slots)
        slot_of_group, limit = _one_each(overlap, groups, slots)
        slot_of_rank = np.zeros(overlap.rank_count, dtype=np.int64)
        slot_of_rank[groups[:, 0]] = slots[_fill(slot_of_group, np.ones(len(slots), dtype=np.int64))]
        return slot_of_rank, bound if is_choice else limit
    # Ranks on any slots, whole groups or not.
    everywhere = np.concatenate(nodes)
    bound = min(bound, _one_each(overlap, np.arange(overlap.rank_count)[:, None], everywhere)[1])
    if is_choice:
        node_of_group, _ = best_spread(worth_of(overlap, groups, table), rooms)
    placed, kept = _in_turns(overlap, groups, table, rooms, bound, node_of_group)
    if kept < bound:
        # Where groups get in each other's way, starting from none may end better.
        other, other_kept = _in_turns(overlap, groups, table, rooms, bound, np.full(len(groups), -1, dtype=np.int64))
        placed = other if other_kept > kept else placed
    return placed, bound


def _one_each(overlap: Overlap, ranks: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, int]:
    return best_spread(worth_of(overlap, ranks, slots[:, None]), np.ones(len(slots), dtype=np.int64))


def _choose(worth: Worth, rooms: np.ndarray, groups: int) -> tuple[np.ndarray, int]:
    """The nodes to use, as few as have room, and the most bytes that groups keep on any so few nodes.

    A small integer program (HiGHS): flows from types of groups to types of nodes, each worth its types; and for each
    node whether it is used, worth the most that single pairs add there. Its linear relaxation prices groups, and any
    prices p >= 0 make a bound: a node is worth at most its gains and what the best groups that fill it are worth
    there beyond their prices; so supply @ p and the best nodes, as many as are used, are no less than any placement.
    """
    needed = fewest_nodes(rooms, groups)
    gains = worth.most_gained(rooms)
    kinds, places = worth.of_types.shape
    supply = np.bincount(worth.type_of_group, minlength=kinds)
    scale = float(max(1, worth.of_types.max(), gains.max()))
    # Variables: the flows, how many nodes of each type are used, and whether each node is.
    # Flows worth nothing are left out: experts make thousands of types, each at home in a few places.
    kind, place = np.nonzero(worth.of_types) if worth.of_types.any() else np.zeros((2, 1), dtype=np.int64)
    flow, node = np.arange(len(kind)), np.arange(len(rooms))
    ones = np.ones(len(flow))
    room = np.zeros(places, dtype=np.int64)
    np.maximum.at(room, worth.type_of_node, rooms)
    sent = coo_array((ones, (kind, flow)), shape=(kinds, len(flow)))
    taken = coo_array((ones, (place, flow)), shape=(places, len(flow)))
    offered = coo_array((-rooms.astype(float), (worth.type_of_node, node)), shape=(places, len(rooms)))
    # A node takes no more of a type than there are: what makes half a node half as useful to the relaxation.
    most_there = -np.minimum(supply[kind], room[place]).astype(float)
    at_most = coo_array((most_there, (flow, place)), shape=(len(flow), places))
    limits = csr_array(
        block_array(
            [
                [sent, None, None],
                [taken, None, offered],
                [eye_array(len(flow)), at_most, None],
                [None, None, coo_array(-rooms[None].astype(float))],
            ]
        )
    )
    above = np.concatenate([supply, np.zeros(places + len(flow)), [-groups]])
    of_type = coo_array((np.ones(len(rooms)), (worth.type_of_node, node)), shape=(places, len(rooms)))
    equal = csr_array(
        block_array(
            [
                [csr_array((places, len(flow))), -eye_array(places), of_type],
                [None, None, coo_array(np.ones((1, len(rooms))))],
            ]
        )
    )
    exactly = np.concatenate([np.zeros(places), [needed]])
    cost = -np.concatenate([worth.of_types[kind, place], np.zeros(places), gains]) / scale
    most = np.repeat([np.inf, 1.0], [len(flow) + places, len(rooms)])
    relaxed = linprog(cost, limits, above, equal, exactly, np.column_stack([np.zeros(len(most)), most]))
    price = np.maximum(np.rint(-relaxed.ineqlin.marginals[:kinds] * scale).astype(np.int64), 0)
    filled = gains + _filled(worth.of_types - price[:, None], supply, rooms, worth.type_of_node)
    bound = int(supply @ price + np.sort(filled)[::-1][:needed].sum())
    solution = milp(
        cost,
        integrality=np.repeat([0, 1], [len(flow) + places, len(rooms)]),
        bounds=Bounds(0, most),
        constraints=[LinearConstraint(limits, -np.inf, above), LinearConstraint(equal, exactly, exactly)],
        options={"node_limit": SEARCH_NODES},
    )
    if solution.x is not None:
        return np.flatnonzero(solution.x[-len(rooms) :] > 0.5), bound
    # None found within the limit: the roomiest nodes always have room, and of those the relaxation's.
    return np.sort(np.lexsort((-relaxed.x[-len(rooms) :], -rooms))[:needed]), bound


def _filled(profit: np.ndarray, supply: np.ndarray, rooms: np.ndarray, type_of_node: np.ndarray) -> np.ndarray:
    """int64 [nodes]: the profit of filling each node with the best groups that there are, by types [kinds, places]."""
    order = np.argsort(-profit, axis=0, kind="stable")
    best, count = np.maximum(np.take_along_axis(profit, order, axis=0), 0), supply[order]
    before = np.cumsum(count, axis=0) - count
    filled = np.zeros(len(rooms), dtype=np.int64)
    for room in np.unique(rooms):
        is_so = rooms == room
        filled[is_so] = (best * np.clip(room - before, 0, count)).sum(axis=0)[type_of_node[is_so]]
    return filled


def _in_turns(
    overlap: Overlap, groups: np.ndarray, table: np.ndarray, rooms: np.ndarray, bound: int, node_of_group: np.ndarray
) -> tuple[np.ndarray, int]:
    """The slot of each rank, with several groups a node, and the bytes kept.

    The groups are first on `node_of_group` (-1: on none). Then, in each turn, every node gives up one group, and takes
    one again, all nodes together by an exact spread, where the slots that other groups make use of hold nothing: the
    best of all exchanges among those groups. Turns are taken until they gain nothing, or `bound` is reached.
    """
    node_of_group = node_of_group.copy()
    turn_of_group = _turns(node_of_group)
    best_slots, used_by_rank = np.full((2, overlap.rank_count), -1, dtype=np.int64)
    best_kept = -1
    if (node_of_group >= 0).any():
        node_of_group = _fill(node_of_group, rooms)
        turn_of_group = _turns(node_of_group)
        best_slots, used_by_rank, best_kept = _seated(overlap, groups, table, node_of_group)
    for _ in range(SWEEPS):
        if best_kept == bound:
            break
        for turn in range(rooms.max()):
            movers = np.flatnonzero((turn_of_group == turn) | (turn_of_group < 0))
            is_open = np.flatnonzero(rooms > turn)
            used_by_rank[groups[movers]] = -1
            rest = overlap.without(used_by_rank[used_by_rank >= 0])
            worth = worth_of(rest, groups[movers], table[is_open])
            found, _ = best_spread(worth, np.ones(len(is_open), dtype=np.int64))
            node_of_group[movers] = np.where(found < 0, -1, is_open[found])
            turn_of_group[movers] = np.where(found < 0, -1, turn)
            seated = movers[found >= 0]
            _, used_by_rank[groups[seated]] = _slots(rest, groups[seated], table[node_of_group[seated]])
        node_of_group = _fill(node_of_group, rooms)
        turn_of_group = _turns(node_of_group)
        slots, used_by_rank, kept = _seated(overlap, groups, table, node_of_group)
        if kept <= best_kept:
            break
        best_kept, best_slots = kept, slots
    return best_slots, best_kept


def _turns(node_of_group: np.ndarray) -> np.ndarray:
    """The groups of each node numbered from 0, those of no node -1."""
    order = np.argsort(node_of_group, kind="stable")
    turns = np.empty_like(node_of_group)
    turns[order] = np.arange(len(order)) - np.searchsorted(node_of_group[order], node_of_group[order])
    return np.where(node_of_group < 0, -1, turns)


def _fill(node_of_group: np.ndarray, rooms: np.ndarray) -> np.ndarray:
    """Groups without a node (-1) on the first nodes with room."""
    filled = node_of_group.copy()
    left = rooms - np.bincount(filled[filled >= 0], minlength=len(rooms))
    is_late = filled < 0
    filled[is_late] = np.repeat(np.arange(len(rooms)), left)[: np.count_nonzero(is_late)]
    return filled


def _seated(
    overlap: Overlap, groups: np.ndarray, table: np.ndarray, node_of_group: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """The best slot of each rank (int64 [ranks]) on the node of its group, the same or -1 where it keeps nothing, and
    the bytes kept.

    Exact; nodes with as many groups are solved together.
    """
    slot_of_rank, used_by_rank = np.full((2, overlap.rank_count), -1, dtype=np.int64)
    order = np.argsort(node_of_group, kind="stable")
    nodes, first, count = np.unique(node_of_group[order], return_index=True, return_counts=True)
    for number in np.unique(count):
        these = count == number
        members = order[first[these][:, None] + np.arange(number)]
        ranks = groups[members].reshape(len(members), -1)
        slot_of_rank[ranks], used_by_rank[ranks] = _slots(overlap, ranks, table[nodes[these]])
    at = np.flatnonzero(used_by_rank >= 0)[:, None]
    return slot_of_rank, used_by_rank, int(overlap.blocks(at, used_by_rank[at]).sum())


def _slots(overlap: Overlap, ranks: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best slots of ranks [n, a] among slots [n, b]: int64 [n, a], and the same with -1 where nothing is kept."""
    columns, _ = fit(overlap, ranks, slots)
    chosen = np.take_along_axis(slots, columns, axis=1)
    kept = overlap.blocks(ranks.reshape(-1, 1), chosen.reshape(-1, 1)).reshape(ranks.shape)
    return chosen, np.where(kept > 0, chosen, -1)
