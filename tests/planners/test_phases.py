"""Phases of tight handovers, against a simulation that makes and releases one allocation at a time."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from small_models import carry_out, config, layouts_on, name_of, nodes_of, small_model

from ray_etc.planners.errors import DoesNotFit
from ray_etc.planners.layout import Allocations, Key, RankLayout, casts_of
from ray_etc.planners.links import Links
from ray_etc.planners.memory import SLACK, choose_mode, memory_of
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.phases import Phase, PhasedPlan, cut_in_phases
from ray_etc.planners.plan import MigrationPlan

MODEL = small_model()
DERIVED: dict[Key, Key] = {t.key: ("main_param", t.name) for t in MODEL if t.kind == "param"}
CHANGES = [
    (config(dp=2, zero=True), config(tp=2)),
    (config(tp=2), config(pp=2)),
    (config(dp=4, zero=True), config(dp=3, zero=True)),
    (config(tp=2, dp=2, zero=True), config(tp=4)),
    (config(dp=2), config(dp=4, zero=True)),
    (config(tp=4), config()),
]
BY_NAME = pytest.mark.parametrize(
    ("before", "after"), CHANGES, ids=[f"{name_of(before)}_to_{name_of(after)}" for before, after in CHANGES]
)


def plan_of(before: ParallelConfig, after: ParallelConfig) -> MigrationPlan:
    slots = range(max(before.world_size, after.world_size))
    old, new = (layouts_on(range(side.world_size), side, MODEL) for side in (before, after))
    return make_plan(old, new, nodes_of(slots), staging_nbytes=2048)


def allocations_of(layouts: Sequence[RankLayout], together: tuple[str, ...] = ("param",)) -> dict[int, Allocations]:
    return {slot: Allocations.expected(layout, together) for slot, layout in enumerate(layouts)}


def cut(plan: MigrationPlan, derived: Mapping[Key, Key] | None, together: tuple[str, ...] = ("param",)) -> PhasedPlan:
    return cut_in_phases(
        plan, allocations_of(list(plan.source), together), allocations_of(list(plan.target), together), derived
    )


def simulate(plan: MigrationPlan, phased: PhasedPlan, together: tuple[str, ...] = ("param",)) -> list[int]:
    """The peak of each rank. Every allocation is made once and released once, by when its tensors need it."""
    peaks = []
    for rank, (source, target) in enumerate(zip(plan.source, plan.target, strict=True)):
        old, new = (Allocations.expected(layout, together) for layout in (source, target))
        there, made = set(range(len(old.nbytes))), set[int]()
        there -= set(phased.dropped[rank])
        peak = sum(old.nbytes)
        for phase in phased.phases:
            assert not made & set(phase.made[rank])
            made |= set(phase.made[rank])
            assert {new.of_shard[n] for n in phase.positions(target)} <= made
            if not phase.is_cast:
                assert {old.of_shard[n] for n in phase.positions(source)} <= there
            staging = int(memory_of(phase.plan).staging[rank])
            held = sum(old.nbytes[n] for n in there) + sum(new.nbytes[n] for n in made)
            peak = max(peak, held + staging)
            assert set(phase.released[rank]) <= there
            there -= set(phase.released[rank])
        assert not there
        assert made == set(range(len(new.nbytes)))
        peaks.append(peak)
    return peaks


@pytest.mark.parametrize("derived", [None, DERIVED], ids=["moved", "cast"])
@BY_NAME
def test_phases_move_everything_once_within_the_peak(
    before: ParallelConfig, after: ParallelConfig, derived: Mapping[Key, Key] | None
) -> None:
    plan = plan_of(before, after)
    phased = cut(plan, derived)
    tensors = [key for phase in phased.phases for key in phase.tensors]
    assert sorted(tensors) == sorted({shard.tensor.key for layout in plan.target for shard in layout})
    for phase in phased.phases:
        phase.plan.check()
        carry_out(phase.plan)
        for rank, layout in enumerate(plan.target):
            assert tuple(layout[n] for n in phase.positions(layout)) == phase.plan.target[rank]
    assert simulate(plan, phased) == phased.peak.tolist()
    memory = memory_of(plan)
    assert (phased.peak <= memory.safe).all()
    if derived is None and not any(phase.is_cast for phase in phased.phases):
        assert phased.nbytes_local + phased.nbytes_wire == plan.nbytes_local + plan.nbytes_wire


@BY_NAME
def test_peak_is_within_the_bound_that_one_step_allows(before: ParallelConfig, after: ParallelConfig) -> None:
    """Beyond `1 + SLACK` only by what a single tensor takes, and by weights in one piece only without casts."""
    plan = plan_of(before, after)
    larger = np.maximum(memory_of(plan).before, memory_of(plan).after)
    largest = max(shard.nbytes for layouts in (plan.source, plan.target) for layout in layouts for shard in layout)
    phased = cut(plan, DERIVED)
    assert (phased.peak - phased.staging <= (1 + SLACK) * larger + largest).all()


def test_weights_are_cast_last_only_where_moving_them_whole_takes_too_much() -> None:
    grows = cut(plan_of(config(dp=2), config(dp=4, zero=True)), DERIVED)
    assert not any(phase.is_cast for phase in grows.phases)
    assert grows.dropped == ((), (), (), ())
    changes = cut(plan_of(config(dp=4, zero=True), config(dp=3, zero=True)), DERIVED)
    assert [phase.is_cast for phase in changes.phases] == [False] * (len(changes.phases) - 1) + [True]
    assert all(dropped == (0,) for dropped in changes.dropped)
    last: Phase = changes.phases[-1]
    assert {kind for kind, _ in last.tensors} == {"param"}
    assert last.plan.nbytes_wire > 0  # the parts whose main weights are on other ranks


def test_one_buffer_for_everything_is_one_phase() -> None:
    plan = plan_of(config(tp=2), config(pp=2))
    kinds = ("param", "main_param", "exp_avg")
    phased = cut(plan, DERIVED, kinds)
    assert [{kind for kind, _ in phase.tensors} for phase in phased.phases] == [
        {"exp_avg"},
        {"main_param"},
        {"param"},
    ]
    assert simulate(plan, phased, kinds) == phased.peak.tolist()


def test_casts_take_each_element_once() -> None:
    """A rank that holds a tied weight twice casts each of them from one of its main weights."""
    [layout] = layouts_on([0], config(), MODEL).values()
    weights = tuple(shard for shard in layout if shard.tensor.kind == "param")
    cast = casts_of(weights, layout, DERIVED)
    elements = [0] * len(weights)
    for _, box, place, _ in cast:
        elements[place] += box.numel
    assert elements == [shard.box.numel for shard in weights]


def test_mode_by_room_and_refusal_with_the_numbers() -> None:
    plan = plan_of(config(tp=2), config(pp=2))
    safe, tight = np.array([100, 120]), np.array([80, 90])
    rooms = [np.array(room) for room in ([100, 120], [100, 119], [90, 89])]
    assert choose_mode(plan, safe, tight, rooms[0], rooms[0]) == "safe"
    assert choose_mode(plan, safe, tight, rooms[1], rooms[1]) == "tight"
    with pytest.raises(DoesNotFit, match=r"slot 1 on node0 .* 120 B of 89 B .* 90 B of 89 B, 1 B too much") as caught:
        choose_mode(plan, safe, tight, rooms[2], rooms[2])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("same_node_bytes_per_s", [3e11, 1e6], ids=["NVLink", "slow within a node"])
def test_dp2_to_dp4_in_phases_takes_the_sources_of_the_whole_plan(same_node_bytes_per_s: float) -> None:
    """Slots 0 and 2 are on one node, 1 and 3 on the other; either old rank could serve either new one."""
    nodes = {slot: "ab"[slot % 2] for slot in range(4)}
    links = Links(same_node_bytes_per_s=same_node_bytes_per_s)
    old, new = (layouts_on(range(dp), config(dp=dp), MODEL) for dp in (2, 4))
    plan = make_plan(old, new, nodes, staging_nbytes=2048, links=links)
    phased = cut_in_phases(plan, allocations_of(list(plan.source)), allocations_of(list(plan.target)), links=links)
    crossing = {
        (move.src_rank % 2, move.dst_rank % 2)
        for part in (plan, *(phase.plan for phase in phased.phases))
        for moves in part.rounds
        for move in moves
    }
    assert crossing == ({(0, 0), (1, 1)} if same_node_bytes_per_s == 3e11 else {(0, 1), (1, 0)})
