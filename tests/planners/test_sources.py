"""The busiest link of a plan against the optimum of a linear program, written here and solved by HiGHS."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.optimize import linprog

from ray_etc.planners import balance
from ray_etc.planners.balance import Network, shares
from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import RankLayout, Shard, TensorSpec
from ray_etc.planners.links import Links
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.plan import MigrationPlan

MIB = 2**20
Link = tuple[str, str, object]
"""("rank" or "node", what it is for, which one)."""


@dataclass(frozen=True)
class Case:
    """Tensors of some MiB, by who holds and who wants each."""

    nodes: dict[int, str]
    tensors: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
    links: Links

    def plan(self) -> MigrationPlan:
        source: dict[int, RankLayout] = dict.fromkeys(self.nodes, ())
        target = dict(source)
        for number, (mib, holders, wanters) in enumerate(self.tensors):
            shape = (mib * 64, 4096)
            shard = Shard(TensorSpec("param", str(number), shape, "float32", 4), Box.whole(shape))
            for layouts, ranks in ((source, holders), (target, wanters)):
                for rank in ranks:
                    layouts[rank] += (shard,)
        plan = make_plan(source, target, self.nodes, links=self.links)
        plan.check()
        return plan

    def links_used(self, src: int, dst: int) -> list[tuple[Link, float]]:
        """The links that a message takes, with their speed in bytes a second."""
        if self.nodes[src] == self.nodes[dst]:
            near = self.links.same_node_bytes_per_s
            return [(("rank", "near out", src), near), (("rank", "near in", dst), near)]
        far, net = self.links.nic_bytes_per_s, self.links.network_bytes_per_s
        return [
            (("rank", "far out", src), far),
            (("rank", "far in", dst), far),
            (("node", "out", self.nodes[src]), net),
            (("node", "in", self.nodes[dst]), net),
        ]

    def busiest_s(self) -> float:
        """Seconds of the busiest link, from the single moves of the plan."""
        busy: Counter[Link] = Counter()
        for moves in self.plan().rounds:
            for move in moves:
                for link, speed in self.links_used(move.src_rank, move.dst_rank):
                    busy[link] += move.nbytes / speed  # type: ignore[assignment]
        return max(busy.values(), default=0.0)

    def optimum_s(self) -> float:
        """The same for the best shares of all holders, where nobody hands anything on."""
        columns: list[tuple[int, int, int]] = []
        demands: dict[tuple[int, int], list[int]] = defaultdict(list)
        load: dict[Link, dict[int, float]] = defaultdict(dict)
        for number, (mib, holders, wanters) in enumerate(self.tensors):
            for dst in set(wanters) - set(holders):
                for src in holders:
                    demands[number, dst].append(len(columns))
                    for link, speed in self.links_used(src, dst):
                        load[link][len(columns)] = mib * MIB / speed
                    columns.append((number, src, dst))
        if not columns:
            return 0.0
        upper = np.zeros((len(load), len(columns) + 1))
        upper[:, -1] = -1
        for row, by_column in enumerate(load.values()):
            for column, seconds in by_column.items():
                upper[row, column] = seconds
        equal = np.zeros((len(demands), len(columns) + 1))
        for row, shares_of in enumerate(demands.values()):
            equal[row, shares_of] = 1
        cost = np.append(np.zeros(len(columns)), 1)
        solution = linprog(cost, A_ub=upper, b_ub=np.zeros(len(upper)), A_eq=equal, b_eq=np.ones(len(equal)))
        assert solution.success
        return float(solution.x[-1])


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    ranks = range(draw.randint(2, 12))
    node_count = draw.randint(1, 4)
    tensors = []
    for _ in range(draw.randint(1, 8)):
        holders = draw.sample(ranks, draw.randint(1, len(ranks)))
        wanters = draw.sample(ranks, draw.randint(1, len(ranks)))
        tensors.append((draw.randint(4, 200), tuple(sorted(holders)), tuple(sorted(wanters))))
    nic = draw.choice([2.5e10, 5e10, 1e11])
    links = Links(
        same_node_bytes_per_s=draw.choice([5e10, 2e11, 4e11]),
        nic_bytes_per_s=nic,
        network_bytes_per_s=nic * draw.choice([1, 2, 8]),
    )
    return Case({rank: f"n{draw.randrange(node_count)}" for rank in ranks}, tensors, links)


@pytest.mark.parametrize("seed", range(200))
def test_busiest_link_is_within_5_percent_of_the_optimum(seed: int) -> None:
    case = random_case(seed)
    assert case.busiest_s() <= 1.05 * case.optimum_s() + 1e-12


def test_parts_with_no_link_in_common_are_balanced_apart_as_well_as_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four stages of 8 ranks on 2 nodes each; every demand may come from any rank of its stage."""
    network = Network(np.arange(32) // 4, Links())
    rng = np.random.default_rng(3)
    nbytes, dst = rng.integers(1, 2**30, 40).astype(float), rng.integers(0, 32, 40)
    src = [np.flatnonzero((np.arange(32) // 8 == rank // 8) & (np.arange(32) != rank)) for rank in dst]
    counts = np.array([len(ranks) for ranks in src])
    option_dst, demand = np.repeat(dst, counts), np.repeat(np.arange(40), counts)
    busiest = {}
    for worth_solving in (1, 10**6):
        monkeypatch.setattr(balance, "WORTH_SOLVING", worth_solving)
        taken = shares(nbytes, counts, np.concatenate(src), option_dst, np.zeros(network.link_count), network)
        np.testing.assert_allclose(np.bincount(demand, taken), 1)
        busiest[worth_solving] = network.busy_s(np.concatenate(src), option_dst, taken * nbytes[demand]).max()
    assert busiest[1] == pytest.approx(busiest[10**6], rel=0.01)
