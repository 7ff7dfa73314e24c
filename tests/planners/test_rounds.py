"""Rounds hold their budget, are few, and make large messages."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import carry_out

from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import RankLayout, Shard, TensorSpec
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.plan import MigrationPlan

MIB = 2**20


def busiest(plan: MigrationPlan) -> int:
    """The most that a rank sends, or receives, in all rounds."""
    total: Counter[tuple[str, int]] = Counter()
    for moves in plan.rounds:
        for move in moves:
            total["sends", move.src_rank] += move.nbytes
            total["receives", move.dst_rank] += move.nbytes
    return max(total.values(), default=0)


def exchange(parts: dict[tuple[int, int], tuple[int, int]], staging_nbytes: int) -> MigrationPlan:
    """Every pair of ranks (src, dst) moves a tensor of its own, of that many float32 rows and columns."""
    source: dict[int, RankLayout] = {slot: () for pair in parts for slot in pair}
    target = dict(source)
    for (src, dst), shape in parts.items():
        shard = Shard(TensorSpec("param", f"{src} {dst}", shape, "float32", 4), Box.whole(shape))
        source[src] += (shard,)
        target[dst] += (shard,)
    return make_plan(source, target, dict.fromkeys(source, "a"), staging_nbytes=staging_nbytes)


PARTS = st.dictionaries(
    st.tuples(st.integers(0, 4), st.integers(5, 9)), st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1
)


@settings(deadline=None)
@given(PARTS, st.integers(8, 4000))
def test_rounds_keep_every_element_and_the_budget(parts: dict[tuple[int, int], tuple[int, int]], staging: int) -> None:
    plan = exchange(parts, staging)
    plan.check()
    carry_out(plan)
    assert all(moves for moves in plan.rounds)


@settings(deadline=None)
@given(PARTS, st.integers(400, 4000))
def test_rounds_are_few(parts: dict[tuple[int, int], tuple[int, int]], staging: int) -> None:
    """Rows of 36 bytes at most are small against the budget: what rounding moves on costs a few rounds."""
    plan = exchange(parts, staging)
    assert plan.round_count <= 3 + 1.25 * -(-busiest(plan) // staging)


def test_one_round_where_all_fits() -> None:
    plan = exchange({(src, dst): (2, 3) for src in range(4) for dst in range(4) if src != dst}, MIB)
    assert plan.round_count == 1
    assert len(plan.moves) == 12


def test_even_exchange_takes_the_fewest_rounds() -> None:
    """Each of four ranks has a message of the budget for each other one: three budgets to send, three rounds."""
    plan = exchange({(src, dst): (64, 4096) for src in range(4) for dst in range(4) if src != dst}, MIB)
    plan.check()
    assert plan.round_count == 3


def test_small_pairs_speak_once() -> None:
    """A rank that sends much to one and little to others is not made to cut the little into every round."""
    plan = exchange({(0, 1): (64, MIB // 4), (0, 2): (1, 64), (0, 3): (1, 64)}, 8 * MIB)
    plan.check()
    assert 8 <= plan.round_count <= 9
    assert [sum(move.dst_rank == dst for moves in plan.rounds for move in moves) for dst in (2, 3)] == [1, 1]


def test_a_row_larger_than_the_budget_is_cut() -> None:
    plan = exchange({(0, 1): (2, 90)}, 80)
    plan.check()
    carry_out(plan)
    assert plan.round_count >= 9


def test_urgent_bytes_leave_first() -> None:
    """Slot 0 will go. What slot 1 holds as well can wait; what nobody else holds is sent before anything else."""
    alone, shared = (
        Shard(TensorSpec("param", name, (256, 4096), "float32", 4), Box((0, 0), (256, 4096)))
        for name in ("alone", "shared")
    )
    source = {0: (shared, alone), 1: (shared,)}
    target = {2: (shared, alone), 3: (shared, alone)}
    nodes = {slot: str(slot) for slot in range(4)}
    plan = make_plan(source, target, nodes, staging_nbytes=MIB, endangered=[0])
    plan.check()
    rounds = {
        name: [
            index
            for index, moves in enumerate(plan.rounds)
            for move in moves
            if plan.source[0][move.src_shard].tensor.name == name and move.src_rank == 0
        ]
        for name in ("alone", "shared")
    }
    assert rounds["alone"]
    assert max(rounds["alone"], default=0) < min(rounds["shared"], default=10**9)
    assert max(rounds["alone"]) + 1 == len(set(rounds["alone"]))


@pytest.mark.parametrize(("staging", "works"), [(7, False), (8, True)])
def test_budget_below_two_elements_is_refused(staging: int, works: bool) -> None:
    if works:
        exchange({(0, 1): (3, 2)}, staging).check()
    else:
        with pytest.raises(ValueError, match="staging_nbytes=7 is less than two elements"):
            exchange({(0, 1): (3, 2)}, staging)


def test_a_scalar_for_all_takes_no_rounds_of_its_own() -> None:
    """What goes down a tree of ranks begins early enough to be everywhere by the last round that the rest needs."""
    small = Shard(TensorSpec("param", "scale", (1,), "float32", 4), Box.whole((1,)))
    large = [Shard(TensorSpec("param", f"w{i}", (64, 4096), "float32", 4), Box.whole((64, 4096))) for i in range(16)]
    source: dict[int, RankLayout] = {0: (small,), **{1 + i: (large[i],) for i in range(16)}}
    target: dict[int, RankLayout] = {17 + i: (small, large[i]) for i in range(16)}
    nodes = {slot: f"node{slot // 8}" for slot in source | target}
    plan = make_plan(source, target, nodes, staging_nbytes=128 * 2**10)
    plan.check()
    carry_out(plan)
    assert any(move.is_relay for moves in plan.rounds for move in moves)
    assert len(plan.rounds) == -(-busiest(plan) // plan.staging_nbytes)
