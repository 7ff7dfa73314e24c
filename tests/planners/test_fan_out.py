"""Many new replicas of the same bytes: the time does not grow with their number, and the network carries little."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ray_etc.planners.boxes import Box
from ray_etc.planners.facts import facts_of
from ray_etc.planners.fan_out import Ways, chosen_hops
from ray_etc.planners.layout import RankLayout, Shard, TensorSpec
from ray_etc.planners.links import Links
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.plan import MigrationPlan

MIB = 2**20


def replicas(holders: int, new: int, *, mib: float, per_node: int = 8) -> MigrationPlan:
    """The first `holders` slots hold `mib` MiB that `new` more want; slots go node by node, the holders' apart."""
    columns = int(mib * MIB) // 4 // 256
    shard = Shard(TensorSpec("param", "w", (256, columns), "float32", 4), Box.whole((256, columns)))
    layout: RankLayout = (shard,)
    slots = range(holders + new)
    nodes = {slot: "old" if slot < holders else f"new{(slot - holders) // per_node}" for slot in slots}
    source = dict.fromkeys(slots[:holders], layout)
    plan = make_plan(source, dict.fromkeys(slots, layout), nodes)
    plan.check()
    return plan


def crossing(plan: MigrationPlan) -> dict[str, Counter[int]]:
    """Bytes that each rank receives from other nodes, by node."""
    found: dict[str, Counter[int]] = {}
    for moves in plan.rounds:
        for move in moves:
            if plan.nodes[move.src_rank] != plan.nodes[move.dst_rank]:
                found.setdefault(plan.nodes[move.dst_rank], Counter())[move.dst_rank] += move.nbytes
    return found


@pytest.mark.parametrize("per_node", [1, 4, 8])
def test_time_of_1_to_64_new_replicas(per_node: int) -> None:
    """From one holder. Each rank must receive 8 GiB whatever happens; that is what one new replica takes."""
    one = facts_of(replicas(1, 1, mib=8192)).seconds.wire
    for new, times in ((2, 1.3), (4, 1.3), (8, 1.3), (16, 1.3), (32, 1.3), (64, 1.45)):
        assert facts_of(replicas(1, new, mib=8192, per_node=per_node)).seconds.wire < times * one, new


@pytest.mark.parametrize("holders", [1, 2, 3])
@pytest.mark.parametrize("new", [8, 16])
def test_network_carries_bytes_once_a_node_over_all_nics(holders: int, new: int) -> None:
    plan = replicas(holders, new, mib=512)
    for node, received in crossing(plan).items():
        assert sum(received.values()) == 512 * MIB, node
        assert len(received) == 8
        assert max(received.values()) <= 1.05 * 512 * MIB / 8


def test_inside_a_node_the_holder_sends_no_more_than_one_copy() -> None:
    layout = replicas(1, 7, mib=8192).source[0]
    plan = make_plan({0: layout}, dict.fromkeys(range(8), layout), dict.fromkeys(range(8), "a"))
    plan.check()
    facts = facts_of(plan)
    assert facts.sent[0] <= 1.02 * 8192 * MIB
    assert facts.seconds.wire < 1.3 * 8192 * MIB / Links().same_node_bytes_per_s


def test_as_many_holders_as_new_replicas_hand_nothing_on() -> None:
    """More hops would gain nothing."""
    for holders, new in ((4, 4), (8, 3)):
        plan = replicas(holders, new, mib=64, per_node=1)
        assert not plan.moves.is_relay.any()
        assert facts_of(plan).rounds <= 5


def test_few_bytes_go_whole_down_a_tree() -> None:
    """64 KiB for 16 nodes: one message a node, and no rank sends to more than two."""
    plan = replicas(1, 16, mib=1 / 16, per_node=1)
    src, dst = plan.ends
    wire = plan.moves.round >= 0
    assert len(set(zip(src[wire].tolist(), dst[wire].tolist(), strict=True))) == 16
    assert np.bincount(src[wire]).max() <= 2
    assert plan.round_count <= 5


def test_two_nodes_of_8_from_8_ranks_that_share_out_the_state() -> None:
    """ZeRO-1 shards want one sender each; nothing is fanned out, and every NIC carries its own part."""
    shards = [
        Shard(TensorSpec("param", "w", (64, 65536), "float32", 4), Box((8 * rank, 0), (8, 65536))) for rank in range(8)
    ]
    nodes = {slot: f"n{slot // 8}" for slot in range(16)}
    plan = make_plan(
        {rank: (shards[rank],) for rank in range(8)}, {8 + rank: (shards[rank],) for rank in range(8)}, nodes
    )
    plan.check()
    assert not plan.moves.is_relay.any()
    assert set(facts_of(plan).sent[:8].tolist()) == {shards[0].nbytes}


def test_shares_of_a_stream_meet_exactly() -> None:
    """Ends are rounded to whole units, so a hair between two of them could lose or repeat one."""
    random = np.random.default_rng(7)
    ways = Ways()
    for number in range(2000):
        ways.add(number, float(number), number + 1.0, 0, np.arange(1, 6))
    shares = np.where(random.random((2000, 5)) < 0.4, 0.0, random.random((2000, 5)))
    shares[:, 3] += 0.1
    hops = chosen_hops(ways, (shares / shares.sum(axis=1, keepdims=True)).ravel())
    for number in range(2000):
        mine = hops.stream == number
        edges = np.append(hops.start[mine], hops.stop[mine][-1])
        assert edges[0] == number
        assert edges[-1] == number + 1
        assert np.array_equal(edges[1:], hops.stop[mine])
