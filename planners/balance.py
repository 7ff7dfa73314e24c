"""Balance: which holder sends what, so that the busiest link is done as early as possible.

A linear program: the shares of each demand among its possible senders, and the time T that no link exceeds, T least.
Its corner solutions are mostly whole: hardly more shares than demands and busy links.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array, vstack
from scipy.sparse.csgraph import connected_components

from ray_etc.planners.intersect import ragged
from ray_etc.planners.links import Links

EVEN_SENDERS = 1e-2
"""Weight of the busiest sender against the busiest link of all, which is often a receiver's."""

WORTH_SOLVING = 4096
"""Parts of fewer options than this that have nothing in common are solved together, not one by one."""

NEAR_FIRST = 1e-3
"""Weight of the time spent on all links together against that of the busiest: enough to prefer the own node."""


@dataclass(frozen=True, eq=False)
class Network:
    """The links of a cluster: each rank's to its own node and to others, each way, and each node's to all others."""

    node: np.ndarray
    """int64 [ranks]: the number of the node of each rank."""
    links: Links

    @property
    def link_count(self) -> int:
        return 4 * len(self.node) + 2 * (int(self.node.max(initial=-1)) + 1)

    def s_per_byte(self) -> np.ndarray:
        """Seconds that a byte takes on each link: float64 [links]."""
        rank = np.array([self.links.same_node_bytes_per_s] * 2 + [self.links.nic_bytes_per_s] * 2)
        node_count = int(self.node.max(initial=-1)) + 1
        speed = np.concatenate([np.tile(rank, len(self.node)), np.full(2 * node_count, self.links.network_bytes_per_s)])
        return 1 / speed

    def used(self, src: np.ndarray, dst: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The links that a message from src[i] to dst[i] uses, as pairs (i, link)."""
        near = np.flatnonzero(self.node[src] == self.node[dst])
        far = np.flatnonzero(self.node[src] != self.node[dst])
        first_node = 4 * len(self.node)
        pairs = [
            (near, 4 * src[near]),
            (near, 4 * dst[near] + 1),
            (far, 4 * src[far] + 2),
            (far, 4 * dst[far] + 3),
            (far, first_node + 2 * self.node[src[far]]),
            (far, first_node + 2 * self.node[dst[far]] + 1),
        ]
        which, link = (np.concatenate(column) for column in zip(*pairs, strict=True))
        return which, link

    def busy_s(self, src: np.ndarray, dst: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """Seconds that each link is busy with messages of `nbytes`: float64 [links]."""
        which, link = self.used(src, dst)
        return np.bincount(link, nbytes[which], self.link_count) * self.s_per_byte()


def shares(
    nbytes: np.ndarray, counts: np.ndarray, src: np.ndarray, dst: np.ndarray, busy_s: np.ndarray, network: Network
) -> np.ndarray:
    """How much of each demand each of its possible senders takes: float64 [options], 0 to 1, of a demand in all 1.

    Demand i is `nbytes[i]` and has `counts[i]` options, end to end in `src` and `dst` (int64 [options]). `busy_s`
    (float64 [links]) is what the links carry besides.
    """
    demand, _ = ragged(counts)
    share = np.ones(len(demand))
    has_choice = (counts > 1)[demand]
    if not has_choice.any():
        return share
    fixed = ~has_choice
    busy_s = busy_s + network.busy_s(src[fixed], dst[fixed], nbytes[demand[fixed]])
    src, dst, demand = src[has_choice], dst[has_choice], np.unique(demand[has_choice], return_inverse=True)[1]
    nbytes = np.repeat(nbytes[counts > 1], counts[counts > 1])
    chosen = np.zeros(len(demand))
    for part in _apart(demand, src, dst, network):
        number = np.unique(demand[part], return_inverse=True)[1]
        chosen[part] = _solve(number, nbytes[part], src[part], dst[part], busy_s, network)
    share[has_choice] = chosen
    return share


def _apart(demand: np.ndarray, src: np.ndarray, dst: np.ndarray, network: Network) -> list[np.ndarray]:
    """The options in parts that share no demand and no link, a few small ones together: positions, rising.

    The time of the solver grows faster than its problem, and stages of a pipeline often have no link in common.
    """
    demand_count = int(demand.max()) + 1
    which, link = network.used(src, dst)
    size = demand_count + network.link_count
    graph = coo_array((np.ones(len(which)), (demand[which], demand_count + link)), shape=(size, size))
    part = np.unique(connected_components(graph, directed=False)[1][demand], return_inverse=True)[1]
    # Parts in their order, cut wherever the options so far are enough for a problem of their own.
    before = np.concatenate([[0], np.cumsum(np.bincount(part))[:-1]])
    batch = before[part] // WORTH_SOLVING
    return [np.flatnonzero(batch == number) for number in np.unique(batch)]


def _solve(
    demand: np.ndarray, nbytes: np.ndarray, src: np.ndarray, dst: np.ndarray, busy_s: np.ndarray, network: Network
) -> np.ndarray:
    """The best shares. Variables: a share each option, the time of the busiest link, and that of the busiest sender."""
    option_count, demand_count = len(demand), int(demand.max()) + 1
    which, link = network.used(src, dst)
    seconds = nbytes[which] * network.s_per_byte()[link]
    unit_s = max(float(busy_s.max(initial=0.0)), float(seconds.max()))
    links, row = np.unique(link, return_inverse=True)
    # Links out of a rank or node have even numbers.
    senders = np.flatnonzero(links % 2 == 0)
    width = option_count + 2
    load = csr_array(coo_array((seconds / unit_s, (row, which)), shape=(len(links), width)))
    time = coo_array((-np.ones(len(links)), (np.arange(len(links)), np.full(len(links), width - 2))), load.shape)
    sending = coo_array((-np.ones(len(senders)), (senders, np.full(len(senders), width - 1))), load.shape)
    total = coo_array((np.ones(option_count), (demand, np.arange(option_count))), shape=(demand_count, width))
    cost = np.zeros(width)
    np.add.at(cost, which, seconds)
    cost *= NEAR_FIRST / max(cost.sum() / option_count * demand_count, 1e-300)
    cost[-2:] = 1, EVEN_SENDERS
    bounds = np.column_stack([np.zeros(width), np.full(width, np.inf)])
    bounds[-2, 0] = float(busy_s.max(initial=0.0)) / unit_s
    solution = linprog(
        cost,
        A_ub=vstack([load + time, (load + sending)[senders]], format="csr"),
        b_ub=-np.concatenate([busy_s[links], busy_s[links[senders]]]) / unit_s,
        A_eq=csr_array(total),
        b_eq=np.ones(demand_count),
        bounds=bounds,
        method="highs",
    )
    if solution.x is None:
        raise RuntimeError(f"HiGHS could not balance {option_count} shares: {solution.message}")
    return np.clip(solution.x[:option_count], 0, 1)
