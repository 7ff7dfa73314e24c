"""`plan.check()` refuses every plan that was tampered with."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
from small_models import config, layouts_on, nodes_of, small_model

from ray_etc.planners.boxes import Box
from ray_etc.planners.errors import PlanError
from ray_etc.planners.layout import RankLayout, Shard, TensorSpec
from ray_etc.planners.match import Bundle
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.moves import LOCAL, MoveTable
from ray_etc.planners.plan import MigrationPlan

MODEL = small_model()
SQUARE = TensorSpec("param", "w", (4, 4), "float32", 4)


def whole(tensor: TensorSpec = SQUARE) -> RankLayout:
    return (Shard(tensor, Box.whole(tensor.shape)),)


@pytest.fixture
def plan() -> MigrationPlan:
    source = layouts_on(range(4), config(tp=2, dp=2, zero=True), MODEL)
    target = layouts_on(range(3), config(pp=3), MODEL)
    made = make_plan(source, target, nodes_of(range(4)), staging_nbytes=1024)
    made.check()
    return made


@pytest.fixture
def relayed() -> MigrationPlan:
    """One holder, four new ranks on another node: each takes a quarter and hands it on."""
    large = whole(TensorSpec("param", "w", (4096, 4096), "float32", 4))
    slots = range(5)
    nodes = {slot: "a" if slot == 0 else "b" for slot in slots}
    made = make_plan({0: large}, dict.fromkeys(slots, large), nodes)
    made.check()
    assert made.moves.is_relay.sum() >= 12
    return made


def with_moves(plan: MigrationPlan, moves: MoveTable) -> MigrationPlan:
    return replace(plan, moves=moves, staging_nbytes=10**12)


def changed(plan: MigrationPlan, row: int, **values: object) -> MigrationPlan:
    """The plan with other values in one row of its moves."""
    columns = {each.name: getattr(plan.moves, each.name).copy() for each in fields(MoveTable)}
    for name, value in values.items():
        columns[name][row] = value
    return with_moves(plan, MoveTable(**columns))


def rows(plan: MigrationPlan, local: bool) -> np.ndarray:
    return np.flatnonzero((plan.moves.round == LOCAL) == local)


both = pytest.mark.parametrize("local", [True, False], ids=["local", "wire"])


@both
def test_every_single_move_is_needed(plan: MigrationPlan, local: bool) -> None:
    everything = np.arange(len(plan.moves))
    for row in rows(plan, local).tolist():
        with pytest.raises(PlanError, match=r"never written|does not have yet") as caught:
            with_moves(plan, plan.moves[everything[everything != row]]).check()
        assert caught.value.tensor == plan.bundles[plan.moves.bundle[row]].tensors[0].key


@both
def test_dropped_move_is_named_with_its_box(plan: MigrationPlan, local: bool) -> None:
    row = next(r for r in rows(plan, local).tolist() if plan.moves.lengths[r].prod() > 1)
    everything = np.arange(len(plan.moves))
    count = plan.moves.lengths[row].prod()
    with pytest.raises(PlanError, match=f"{count} elements are never written") as caught:
        with_moves(plan, plan.moves[everything[everything != row]]).check()
    assert caught.value.box is not None
    assert caught.value.box.numel == count
    assert caught.value.ranks == (plan.ends[1][row],)


@both
def test_every_doubled_move(plan: MigrationPlan, local: bool) -> None:
    for row in rows(plan, local).tolist():
        with pytest.raises(PlanError, match="written twice"):
            with_moves(plan, plan.moves.and_then(plan.moves[np.array([row])])).check()


@both
def test_shifted_box(plan: MigrationPlan, local: bool) -> None:
    for row in rows(plan, local).tolist():
        away = plan.moves.offsets[row].copy()
        away[0] += 1
        with pytest.raises(PlanError, match=r"outside its|written twice|own slot holds|does not have"):
            changed(plan, row, offsets=away).check()


@both
def test_wrong_tensor(plan: MigrationPlan, local: bool) -> None:
    """The source shard of another kind has the same name, shape and box, and still is another tensor."""
    params = [number for number, bundle in enumerate(plan.bundles) if bundle.tensors[0].kind == "param"]
    row = next(r for r in rows(plan, local).tolist() if plan.moves.bundle[r] in params and not plan.moves.is_relay[r])
    bundle = plan.bundles[plan.moves.bundle[row]]
    of_param = plan.source.family[plan.moves.source_row[row]]
    for other in np.flatnonzero(plan.source.family != of_param).tolist():
        family = plan.source.families[plan.source.family[other]]
        if bundle.tensors[0].name in {tensor.name for tensor in family}:
            with pytest.raises(PlanError, match="reads another tensor"):
                changed(plan, row, source_row=other).check()
            return
    raise AssertionError("the model has every tensor in three kinds")


@both
def test_wrong_bundle(plan: MigrationPlan, local: bool) -> None:
    row = int(rows(plan, local)[0])
    with pytest.raises(PlanError, match="reads another tensor"):
        changed(plan, row, bundle=(plan.moves.bundle[row] + 1) % len(plan.bundles)).check()


def test_tensor_that_no_bundle_moves(plan: MigrationPlan) -> None:
    first = next(bundle for bundle in plan.bundles if len(bundle.tensors) > 1)
    fewer = Bundle(first.tensors[1:], first.source_families, first.target_family)
    bundles = tuple(fewer if bundle is first else bundle for bundle in plan.bundles)
    with pytest.raises(PlanError, match="not in exactly one bundle") as caught:
        replace(plan, bundles=bundles).check()
    assert caught.value.tensor == first.tensors[0].key


@both
def test_shard_that_is_not_there(plan: MigrationPlan, local: bool) -> None:
    row = int(rows(plan, local)[0])
    for name in ("source_row", "target_row"):
        for number in (-1, 10**6):
            with pytest.raises(PlanError, match="not there"):
                changed(plan, row, **{name: number}).check()


def test_empty_box(plan: MigrationPlan) -> None:
    with pytest.raises(PlanError, match="empty"):
        changed(plan, 0, lengths=np.zeros(plan.moves.lengths.shape[1], dtype=np.int64)).check()


def test_local_move_in_a_round(plan: MigrationPlan) -> None:
    for row in rows(plan, local=True).tolist():
        with pytest.raises(PlanError, match="inside one rank"):
            changed(plan, row, round=0).check()


def test_wire_move_among_the_local(plan: MigrationPlan) -> None:
    for row in rows(plan, local=False).tolist():
        with pytest.raises(PlanError, match="between two ranks"):
            changed(plan, row, round=LOCAL).check()


def test_fetch_of_what_the_own_slot_holds() -> None:
    plan = make_plan({0: whole(), 1: whole()}, {0: whole()}, {0: "a", 1: "a"})
    with pytest.raises(PlanError, match="own slot holds"):
        changed(plan, 0, source_row=1, round=0).check()


def test_relay_before_its_bytes_came(relayed: MigrationPlan) -> None:
    for row in np.flatnonzero(relayed.moves.is_relay).tolist():
        with pytest.raises(PlanError, match="does not have yet"):
            changed(relayed, row, round=0).check()


def test_relay_of_bytes_that_come_to_another(relayed: MigrationPlan) -> None:
    """All four have rows of the same tensor; only one of them has this part in time."""
    row = int(np.flatnonzero(relayed.moves.is_relay & (relayed.moves.round == 1))[0])
    src, dst = (int(end[row]) for end in relayed.ends)
    other = next(r for r in range(len(relayed.target.rank)) if relayed.target.rank[r] not in (0, src, dst))
    with pytest.raises(PlanError, match="does not have yet"):
        changed(relayed, row, source_row=other).check()


def test_round_over_budget(plan: MigrationPlan) -> None:
    with pytest.raises(PlanError, match="more than the 100 of staging"):
        replace(plan, staging_nbytes=100).check()


def test_bound_above_the_wire(plan: MigrationPlan) -> None:
    with pytest.raises(PlanError, match="below the bound"):
        replace(plan, nbytes_lower_bound=plan.nbytes_wire + 1).check()


def test_boxes_that_no_line_divides() -> None:
    """Five boxes round a centre, as in a pinwheel: no straight cut separates them."""
    tensor = TensorSpec("param", "w", (3, 3), "int8", 1)
    blades = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    source = {0: tuple(Shard(tensor, box) for box in blades)}
    plan = make_plan(source, {1: whole(tensor)}, {0: "a", 1: "a"})
    plan.check()
    third = next(r for r in range(len(plan.moves)) if plan.moves.offsets[r].tolist() == [2, 1])
    first = next(r for r in range(len(plan.moves)) if plan.moves.offsets[r].tolist() == [0, 0])
    twice = changed(
        plan, third, source_row=plan.moves.source_row[first], offsets=np.array([0, 0]), lengths=np.array([1, 2])
    )
    with pytest.raises(PlanError, match="written twice"):
        twice.check()


def test_error_survives_a_pickle() -> None:
    error = PlanError("why", (1, 2), ("param", "w"), Box((0,), (1,)))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "why; tensor param w; offsets (0,) lengths (1,); ranks 1, 2"
    assert (again.ranks, again.tensor, again.box) == (error.ranks, error.tensor, error.box)
