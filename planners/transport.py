"""The transport problem: units of some kinds to places of some kinds, exactly, in whole numbers, with prices."""

from __future__ import annotations

import numpy as np

_FAR = 2**61


def transport(value: np.ndarray, supply: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How many units of each kind go to each kind of place so that the sum of `value` is largest.

    `value` is int64 [kinds, places], not negative; `supply` [kinds] units may be sent, or stay; `room` [places] is what
    the places take. Returns (flow, prices of kinds, prices of places): flow is int64 [kinds, places]; prices are not
    negative, cover every value (u[i] + v[j] >= value[i, j]), and supply @ u + room @ v is the value of the flow,
    which proves it the largest.

    Successive shortest paths (Ahuja, Magnanti and Orlin, Network Flows, 1993, section 9.7), each by Bellman and Ford
    on the dense matrix: meant for hundreds of kinds, not thousands.
    """
    flow = np.zeros(value.shape, dtype=np.int64)
    if not value.size:
        return flow, np.zeros(len(supply), dtype=np.int64), np.zeros(len(room), dtype=np.int64)
    supply_left, room_left = supply.astype(np.int64), room.astype(np.int64)
    kinds, places = np.arange(value.shape[0]), np.arange(value.shape[1])
    while True:
        kind_cost = np.where(supply_left > 0, 0, _FAR)
        place_cost = np.full(len(room), _FAR)
        via_place, via_kind = np.full(len(supply), -1), np.full(len(room), -1)
        while True:
            steps = np.where(kind_cost[:, None] < _FAR, kind_cost[:, None] - value, _FAR)
            best = steps.argmin(axis=0)
            nearer = steps[best, places] < place_cost
            if not nearer.any():
                break
            place_cost[nearer], via_kind[nearer] = steps[best, places][nearer], best[nearer]
            back = np.where((flow > 0) & (place_cost < _FAR), place_cost + value, _FAR)
            best = back.argmin(axis=1)
            nearer = back[kinds, best] < kind_cost
            kind_cost[nearer], via_place[nearer] = back[kinds, best][nearer], best[nearer]
        end = int(np.where(room_left > 0, place_cost, _FAR).argmin())
        if room_left[end] <= 0 or place_cost[end] >= 0:
            return flow, *_prices(value, flow, supply_left, room_left)
        forward, backward, place = [], [], end
        while True:
            kind = int(via_kind[place])
            forward.append((kind, place))
            if via_place[kind] < 0:
                break
            place = int(via_place[kind])
            backward.append((kind, place))
        amount = min(supply_left[kind], room_left[end], *(flow[pair] for pair in backward))
        for pair in forward:
            flow[pair] += amount
        for pair in backward:
            flow[pair] -= amount
        supply_left[kind] -= amount
        room_left[end] -= amount


def _prices(
    value: np.ndarray, flow: np.ndarray, supply_left: np.ndarray, room_left: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Prices that prove `flow`, by complementary slackness: 0 where something is left, tight where something flows.

    They are shortest distances in the residual graph, closed by a node that stands for "not sent" and "not filled".
    A best flow leaves no cycle that gains, so the distances settle.
    """
    is_sent, is_filled = flow.any(axis=1), flow.any(axis=0)
    kind, place = np.zeros(len(value), dtype=np.int64), np.zeros(value.shape[1], dtype=np.int64)
    idle = 0
    while True:
        before = (kind, place, idle)
        least = [kind[is_sent].min(initial=0), place[room_left > 0].min(initial=0)]
        idle = min(idle, *map(int, least))
        kind = np.where(supply_left > 0, np.minimum(kind, idle), kind)
        place = np.where(is_filled, np.minimum(place, idle), place)
        place = np.minimum(place, (kind[:, None] - value).min(axis=0))
        kind = np.minimum(kind, np.where(flow > 0, place + value, _FAR).min(axis=1))
        if idle == before[2] and np.array_equal(kind, before[0]) and np.array_equal(place, before[1]):
            break
    of_kind = np.maximum(kind - idle, 0)
    return of_kind, np.maximum((value - of_kind[:, None]).max(axis=0), 0)
