"""Plans: proved by `check()`, and carried out on numbered elements by an executor that trusts nothing."""

from __future__ import annotations

import pickle
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import (
    carry_out,
    config,
    configs_up_to,
    layouts_on,
    name_of,
    nodes_of,
    overlap_nbytes,
    small_model,
    total_nbytes,
)

from ray_etc.planners.assign import assign
from ray_etc.planners.boxes import Box
from ray_etc.planners.errors import StateMissing
from ray_etc.planners.expected import expected_layouts
from ray_etc.planners.layout import RankLayout, Shard, TensorSpec
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.overlap import Overlap
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.plan import MigrationPlan

MODEL = small_model()
TINY = TensorSpec("param", "w", (8, 4), "float32", 4)


def transition(
    before: ParallelConfig,
    after: ParallelConfig,
    *,
    source_slots: list[int] | None = None,
    target_slots: list[int] | None = None,
    staging_nbytes: int = 2**20,
) -> MigrationPlan:
    """A plan between expected layouts, proved and carried out."""
    source = layouts_on(source_slots or range(before.world_size), before, MODEL)
    target = layouts_on(target_slots or range(after.world_size), after, MODEL)
    plan = make_plan(source, target, nodes_of(sorted({*source, *target})), staging_nbytes=staging_nbytes)
    plan.check()
    carry_out(plan)
    assert plan.nbytes_local + plan.nbytes_wire == total_nbytes(target)
    return plan


@pytest.mark.parametrize("after", configs_up_to(4), ids=name_of)
@pytest.mark.parametrize("before", configs_up_to(4), ids=name_of)
def test_every_small_transition(before: ParallelConfig, after: ParallelConfig) -> None:
    transition(before, after)


def test_tp2_to_tp4_dp2() -> None:
    transition(config(tp=2), config(tp=4, dp=2))


def test_tp2_pp2_dp2_zero_to_pp3_zero_on_other_slots() -> None:
    transition(config(tp=2, pp=2, dp=2, zero=True), config(pp=3, zero=True), target_slots=[9, 4, 6])


def test_dp7_zero_to_tp2_pp2_dp2_zero_in_small_rounds() -> None:
    plan = transition(config(dp=7, zero=True), config(tp=2, pp=2, dp=2, zero=True), staging_nbytes=256)
    assert len(plan.rounds) > 1


def test_tp8_with_empty_shards_to_one() -> None:
    plan = transition(config(tp=8), config())
    assert any(shard.box.numel == 0 for layout in plan.source for shard in layout)


def test_one_to_tp8_with_empty_shards() -> None:
    plan = transition(config(), config(tp=8))
    assert any(shard.box.numel == 0 for layout in plan.target for shard in layout)


def test_dp2_to_dp3_and_back_to_dp2_by_other_slots() -> None:
    transition(config(dp=2, zero=True), config(dp=3, zero=True))
    transition(config(dp=3, zero=True), config(dp=2, zero=True), target_slots=[2, 0])


def test_same_configuration_on_the_same_slots_moves_nothing() -> None:
    for parallel in configs_up_to(4):
        plan = transition(parallel, parallel)
        assert plan.nbytes_wire == 0
        assert plan.rounds == ()
        assert plan.nbytes_lower_bound == 0


def test_everything_leaves_for_new_slots() -> None:
    plan = transition(config(tp=2), config(tp=2), target_slots=[2, 3])
    assert plan.local == ()
    assert plan.nbytes_lower_bound == 0


@pytest.mark.parametrize("after", configs_up_to(4), ids=name_of)
def test_lower_bound_is_the_best_of_all_placements(after: ParallelConfig) -> None:
    source = layouts_on(range(4), config(tp=2, dp=2, zero=True), MODEL)
    wanted = expected_layouts(MODEL, after)
    placements = permutations(range(4), after.world_size)
    plans = [make_plan(source, dict(zip(p, wanted, strict=True)), nodes_of(range(4))) for p in placements]
    assert {plan.nbytes_lower_bound for plan in plans} == {min(plan.nbytes_wire for plan in plans)}


@pytest.mark.parametrize("after", configs_up_to(4), ids=name_of)
def test_assigned_ranks_reach_the_lower_bound(after: ParallelConfig) -> None:
    source = layouts_on(range(4), config(tp=2, pp=2), MODEL)
    wanted = expected_layouts(MODEL, after)
    overlap = Overlap.from_dense(overlap_nbytes(source, wanted, range(4)))
    # One node, as far as the assignment knows: fewer nodes would come before fewer bytes.
    chosen = assign(overlap, range(4), nodes_of(range(4), per_node=4), [])
    plan = make_plan(source, dict(zip(chosen.slot_of_rank, wanted, strict=True)), nodes_of(range(4)))
    assert plan.nbytes_wire == plan.nbytes_lower_bound
    assert plan.nbytes_local == chosen.nbytes_kept


def whole(tensor: TensorSpec = TINY) -> RankLayout:
    return (Shard(tensor, Box.whole(tensor.shape)),)


def test_bytes_are_balanced_over_replicas() -> None:
    """Two of the three holders are the only ones of another part each: the third sends what all three hold."""
    large, first, second = (
        whole(TensorSpec("param", name, (3000, 8192), "float32", 4)) for name in ("all", "first", "second")
    )
    source = {0: large + first, 1: large + second, 2: large}
    plan = make_plan(source, source | {3: large + first + second}, {0: "a", 1: "b", 2: "c", 3: "d"})
    plan.check()
    sent = [sum(move.nbytes for moves in plan.rounds for move in moves if move.src_rank == rank) for rank in range(3)]
    assert max(sent) <= 3000 * 8192 * 4 * 1.01
    source = dict.fromkeys(range(3), large)
    plan = make_plan(source, dict.fromkeys(range(6), large), {slot: str(slot) for slot in range(6)})
    plan.check()
    sent = [sum(move.nbytes for moves in plan.rounds for move in moves if move.src_rank == rank) for rank in range(6)]
    assert max(sent) <= 3000 * 8192 * 4 * 1.01


def test_few_bytes_come_in_one_message() -> None:
    source = {slot: whole() for slot in range(3)}
    plan = make_plan(source, source | {3: whole()}, dict.fromkeys(range(4), "node"))
    ((only,),) = plan.rounds
    assert only.nbytes == 128


def test_replica_on_the_same_node_comes_first() -> None:
    source = {slot: whole() for slot in range(3)}
    plan = make_plan(source, source | {3: whole()}, {0: "a", 1: "a", 2: "b", 3: "b"})
    assert {move.src_rank for moves in plan.rounds for move in moves} == {2}


def test_same_input_in_another_order_gives_the_same_plan() -> None:
    source = layouts_on(range(4), config(tp=2, dp=2, zero=True), MODEL)
    target = layouts_on(range(3), config(pp=3), MODEL)
    nodes = nodes_of(range(4))
    plan = make_plan(source, target, nodes, staging_nbytes=512)
    turned = make_plan(dict(reversed(source.items())), dict(reversed(target.items())), nodes, staging_nbytes=512)
    assert plan.local == turned.local
    assert plan.rounds == turned.rounds
    assert len(plan.rounds) > 1


def test_overlapping_source_shards_are_read_once() -> None:
    tied = (Shard(TINY, Box((0, 0), (6, 4))), Shard(TINY, Box((2, 0), (6, 4))))
    for target_slot in (0, 1):
        plan = make_plan({0: tied}, {target_slot: whole() + tied}, {0: "a", 1: "a"})
        plan.check()
        carry_out(plan)


def test_missing_rows_are_named_and_counted_once() -> None:
    source = {0: (Shard(TINY, Box((0, 0), (5, 4))),)}
    with pytest.raises(StateMissing, match=r"12 elements \(48 bytes\) of 1 tensors") as caught:
        make_plan(source, {0: whole(), 1: whole()}, {0: "a", 1: "a"})
    assert [part.box for part in caught.value.missing] == [Box((5, 0), (3, 4))]
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.missing == caught.value.missing
    assert str(again) == str(caught.value)


def test_lost_zero_shard_raises_state_missing() -> None:
    source = layouts_on(range(2), config(dp=2, zero=True), MODEL)
    lost = source.pop(1)
    with pytest.raises(StateMissing) as caught:
        make_plan(source, layouts_on([0], config(), MODEL), nodes_of(range(2)))
    optimizer = {shard.tensor.key for shard in lost if shard.tensor.kind != "param"}
    assert {(part.kind, part.name) for part in caught.value.missing} <= optimizer
    assert "more parts" in str(caught.value)


def test_lost_replica_is_covered_by_the_other() -> None:
    source = layouts_on(range(2), config(dp=2), MODEL)
    del source[1]
    plan = make_plan(source, layouts_on([0, 2], config(tp=2), MODEL), nodes_of(range(3)))
    plan.check()
    carry_out(plan)


@pytest.mark.parametrize(
    "other",
    [
        TensorSpec("param", "w", (4, 8), "float32", 4),
        TensorSpec("param", "w", (8, 4), "bfloat16", 2),
        TensorSpec("param", "w", (32,), "float32", 4),
        TensorSpec("main_param", "w", (8, 4), "float32", 4),
    ],
    ids=["shape", "dtype", "ndim", "kind"],
)
def test_another_form_is_never_used(other: TensorSpec) -> None:
    with pytest.raises(StateMissing, match="param w"):
        make_plan({0: whole(other)}, {0: whole()}, {0: "a"})


def test_empty_target_shard_needs_no_source() -> None:
    make_plan({}, {0: (Shard(TINY, Box((8, 0), (0, 4))),)}, {0: "a"}).check()


def test_slot_without_a_node_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no node is given for slots \[1\]"):
        make_plan({0: whole()}, {1: whole()}, {0: "a"})


@st.composite
def scattered(draw: st.DrawFn, slots: int) -> dict[int, RankLayout]:
    """Arbitrary boxes of two tensors, overlapping, empty and repeated, on `slots` slots."""
    layouts = {}
    for slot in range(slots):
        shards = []
        for _ in range(draw(st.integers(0, 4))):
            tensor = draw(st.sampled_from([TINY, TensorSpec("param", "cube", (3, 4, 5), "int8", 1)]))
            offsets = tuple(draw(st.integers(0, n)) for n in tensor.shape)
            lengths = tuple(draw(st.integers(0, n - o)) for o, n in zip(offsets, tensor.shape, strict=True))
            shards.append(Shard(tensor, Box(offsets, lengths)))
        layouts[slot] = tuple(shards)
    return layouts


@settings(deadline=None)
@given(scattered(3), scattered(4), st.integers(8, 200))
def test_any_boxes_to_any_boxes(source: dict[int, RankLayout], target: dict[int, RankLayout], staging: int) -> None:
    source[4] = whole() + whole(TensorSpec("param", "cube", (3, 4, 5), "int8", 1))
    plan = make_plan(source, target, nodes_of(range(5)), staging_nbytes=staging)
    plan.check()
    carry_out(plan)
