"""Facts of plans, against figures made by hand and against counts that go move by move."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from small_models import config, layouts_on, nodes_of, small_model

from ray_etc.planners.boxes import Box
from ray_etc.planners.facts import facts_of
from ray_etc.planners.layout import RankLayout, Shard, TensorSpec
from ray_etc.planners.links import Links
from ray_etc.planners.memory import STAGING_BUFFERS
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.plan import MigrationPlan
from ray_etc.planners.rank_plan import Move

MODEL = small_model()
SLOW = Links(copy_bytes_per_s=10, same_node_bytes_per_s=100, nic_bytes_per_s=50, message_s=0.5)


def part(kind: str, dtype: str, itemsize: int, start: int, count: int) -> Shard:
    return Shard(TensorSpec(kind, "w", (8,), dtype, itemsize, split_dim=0), Box((start,), (count,)))


def half_moves(nodes: dict[int, str]) -> MigrationPlan:
    """Slot 0 holds 8 elements, bf16 weights and an fp32 moment, 48 bytes; the later half, 24 bytes, goes to slot 1."""

    def held(start: int, count: int) -> RankLayout:
        return (part("param", "bfloat16", 2, start, count), part("exp_avg", "float32", 4, start, count))

    return make_plan({0: held(0, 8)}, {0: held(0, 4), 1: held(4, 4)}, nodes, links=SLOW)


def between(
    before: ParallelConfig,
    after: ParallelConfig,
    per_node: int,
    staging_nbytes: int = 512,
    endangered: tuple[int, ...] = (),
) -> MigrationPlan:
    slots = range(max(before.world_size, after.world_size))
    return make_plan(
        layouts_on(range(before.world_size), before, MODEL),
        layouts_on(range(after.world_size), after, MODEL),
        nodes_of(slots, per_node),
        staging_nbytes=staging_nbytes,
        endangered=endangered,
    )


PLANS = [
    pytest.param(config(tp=2), config(tp=2, dp=3), 2, id="replicas"),
    pytest.param(config(tp=4), config(tp=2, pp=2, dp=2, zero=True), 4, id="all_axes"),
    pytest.param(config(dp=6, zero=True), config(dp=4, zero=True), 2, id="zero_shrinks"),
    pytest.param(config(dp=1), config(dp=8), 4, id="fan_out"),
]


@pytest.mark.parametrize(("before", "after", "per_node"), PLANS)
def test_bytes_slices_and_messages_counted_move_by_move(
    before: ParallelConfig, after: ParallelConfig, per_node: int
) -> None:
    plan = between(before, after, per_node)
    facts = facts_of(plan)
    nbytes, slices = (
        Counter({"same slot": sum(move.nbytes for move in plan.local)}),
        Counter({"same slot": len(plan.local)}),
    )
    messages: dict[str, set[tuple[int, int, int]]] = defaultdict(set)
    sent, received, out_of, into = Counter[int](), Counter[int](), Counter[str](), Counter[str]()
    for number, moves in enumerate(plan.rounds):
        for move in moves:
            src, dst = plan.nodes[move.src_rank], plan.nodes[move.dst_rank]
            name = "same node" if src == dst else "other node"
            nbytes[name] += move.nbytes
            slices[name] += 1
            messages[name].add((number, move.src_rank, move.dst_rank))
            sent[move.src_rank] += move.nbytes
            received[move.dst_rank] += move.nbytes
            if src != dst:
                out_of[src] += move.nbytes
                into[dst] += move.nbytes
    for name, use in facts.links.items():
        counted = slices[name] if name == "same slot" else len(messages[name])
        assert (use.nbytes, use.slices, use.messages) == (nbytes[name], slices[name], counted)
        assert use.mean_slice_nbytes == nbytes[name] // max(slices[name], 1)
        assert use.mean_message_nbytes == nbytes[name] // max(counted, 1)
    assert facts.sent.tolist() == [sent[rank] for rank in range(len(plan.slots))]
    assert facts.received.tolist() == [received[rank] for rank in range(len(plan.slots))]
    assert facts.node_sent.tolist() == [out_of[node] for node in facts.node_names]
    assert facts.node_received.tolist() == [into[node] for node in facts.node_names]
    assert facts.nbytes_needed == sum(nbytes.values())
    assert facts.nbytes_relayed == sum(move.nbytes for moves in plan.rounds for move in moves if move.is_relay)


def test_memory_by_hand() -> None:
    """One message of slices of 8 and 16 bytes, in the first buffer, each at a multiple of 16. Tight makes the moment
    (16 bytes) while all 48 are there."""
    memory = facts_of(half_moves({0: "a", 1: "a"})).memory
    assert memory.before.tolist() == [48, 0]
    assert memory.after.tolist() == [24, 24]
    assert memory.staging.tolist() == [32, 32]
    assert memory.safe.tolist() == [48 + 24 + 32, 24 + 32]
    assert memory.tight.tolist() == [48 + 16 + 32, 24 + 32]
    assert [memory.mode_for(nbytes) for nbytes in (104, 103, 96, 95)] == ["safe", "tight", "tight", None]


def packed(moves: Sequence[Move]) -> int:
    return sum(-(-move.nbytes // 16) * 16 for move in moves)


@pytest.mark.parametrize(("before", "after", "per_node"), PLANS)
def test_memory_counted_slice_by_slice(before: ParallelConfig, after: ParallelConfig, per_node: int) -> None:
    plan = between(before, after, per_node)
    memory = facts_of(plan).memory
    for rank, (old, new) in enumerate(zip(plan.source, plan.target, strict=True)):
        view = plan.for_rank(rank)
        ways = (
            [sum(map(packed, part.sends.values())) for part in view.rounds],
            [sum(map(packed, part.receives.values())) for part in view.rounds],
        )
        staging = sum(max(way[first::STAGING_BUFFERS], default=0) for way in ways for first in range(STAGING_BUFFERS))
        assert memory.staging[rank] == staging
        assert memory.safe[rank] == sum(shard.nbytes for shard in (*old, *new)) + staging


@pytest.mark.parametrize(("other", "wire_s"), [("a", 24 / 100 + 0.5), ("b", 24 / 50 + 0.5)])
def test_seconds_by_hand(other: str, wire_s: float) -> None:
    """24 bytes stay and 24 go in one message, beside which the copies have a fifth of their speed."""
    seconds = facts_of(half_moves({0: "a", 1: other}), SLOW).seconds
    assert seconds.local == pytest.approx(24 / 10)
    assert seconds.wire == pytest.approx(wire_s)
    assert seconds.total == pytest.approx(wire_s + 24 / 10 - wire_s / 5)


@pytest.mark.parametrize("staging_nbytes", [128, 512, 4096])
def test_leaving_slots_are_saved_first(staging_nbytes: int) -> None:
    before, after = config(dp=6, zero=True), config(dp=4, zero=True)
    plan = between(before, after, 2, staging_nbytes, endangered=(4, 5))
    facts = facts_of(plan)
    assert 0 < facts.saved_s <= facts.seconds.wire
    unaware = replace(between(before, after, 2, staging_nbytes), endangered=(4, 5))
    assert facts.saved_s <= facts_of(unaware).saved_s
    last = max(n for n, moves in enumerate(plan.rounds) for move in moves if move.src_rank in (4, 5))
    assert (facts.saved_s == pytest.approx(facts.seconds.wire)) == (last == facts.rounds - 1)


def test_nothing_moves() -> None:
    facts = facts_of(between(config(tp=2), config(tp=2), 2))
    assert (facts.nbytes_moved, facts.rounds, facts.seconds.wire, facts.saved_s) == (0, 0, 0, 0)
    assert facts.busiest_link_nbytes == 0
    assert facts.memory.staging.tolist() == [0, 0]
