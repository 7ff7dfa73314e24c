"""`plan.check()` refuses every plan that was tampered with."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
from small_models import config, layouts_on, nodes_of, small_model

from ray_etc.planners.boxes import Box
from ray_etc.planners.errors import PlanError
from ray_etc.planners.layout import Shard, TensorSpec
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.plan import MigrationPlan, Move

MODEL = small_model()


@pytest.fixture
def plan() -> MigrationPlan:
    source = layouts_on(range(4), config(tp=2, dp=2, zero=True), MODEL)
    target = layouts_on(range(3), config(pp=3), MODEL)
    made = make_plan(source, target, nodes_of(range(4)), staging_nbytes=1024)
    made.check()
    return made


def with_moves(plan: MigrationPlan, change: Callable[[list[Move]], list[Move]], *, local: bool) -> MigrationPlan:
    if local:
        return replace(plan, local=tuple(change(list(plan.local))))
    return replace(plan, rounds=(tuple(change(list(plan.rounds[0]))), *plan.rounds[1:]), staging_nbytes=10**9)


both = pytest.mark.parametrize("local", [True, False], ids=["local", "wire"])


@both
def test_dropped_move(plan: MigrationPlan, local: bool) -> None:
    dropped = (plan.local if local else plan.rounds[0])[0]
    with pytest.raises(PlanError, match=f"{dropped.box.numel} elements are never written") as caught:
        with_moves(plan, lambda moves: moves[1:], local=local).check()
    assert caught.value.box == dropped.box
    assert caught.value.ranks == (dropped.dst_rank,)


@both
def test_doubled_move(plan: MigrationPlan, local: bool) -> None:
    with pytest.raises(PlanError, match="written twice"):
        with_moves(plan, lambda moves: [*moves, moves[0]], local=local).check()


@both
def test_every_single_move_is_needed(plan: MigrationPlan, local: bool) -> None:
    for index in range(len(plan.local if local else plan.rounds[0])):
        with pytest.raises(PlanError, match="never written"):
            with_moves(plan, lambda moves, i=index: moves[:i] + moves[i + 1 :], local=local).check()  # type: ignore[misc]


@both
def test_wrong_box(plan: MigrationPlan, local: bool) -> None:
    def shift(moves: list[Move]) -> list[Move]:
        move = next(move for move in moves if move.box.offsets)
        away = move.box.shifted((1, *(0 for _ in move.box.offsets[1:])))
        return [replace(move, box=away), *(other for other in moves if other is not move)]

    with pytest.raises(PlanError, match=r"outside its|written twice"):
        with_moves(plan, shift, local=local).check()


@both
def test_wrong_tensor(plan: MigrationPlan, local: bool) -> None:
    """The source shard of another kind has the same name, shape and box, and still is another tensor."""

    def swap(moves: list[Move]) -> list[Move]:
        for index, move in enumerate(moves):
            layout = plan.source[move.src_rank]
            for position, shard in enumerate(layout):
                mine = layout[move.src_shard]
                if shard.tensor.kind != mine.tensor.kind and shard.tensor.name == mine.tensor.name:
                    moves[index] = replace(move, src_shard=position)
                    return moves
        raise AssertionError("the model has every tensor in three kinds")

    with pytest.raises(PlanError, match="reads another tensor"):
        with_moves(plan, swap, local=local).check()


@both
def test_wrong_nbytes(plan: MigrationPlan, local: bool) -> None:
    with pytest.raises(PlanError, match="is given as"):
        with_moves(plan, lambda m: [replace(m[0], nbytes=m[0].nbytes + 1), *m[1:]], local=local).check()


@both
def test_shard_that_is_not_there(plan: MigrationPlan, local: bool) -> None:
    with pytest.raises(PlanError, match="not there"):
        with_moves(plan, lambda m: [replace(m[0], src_shard=999), *m[1:]], local=local).check()


def test_local_move_in_a_round(plan: MigrationPlan) -> None:
    moved = replace(plan, local=plan.local[1:], rounds=(*plan.rounds, (plan.local[0],)))
    with pytest.raises(PlanError, match="inside one rank"):
        moved.check()


def test_wire_move_among_the_local(plan: MigrationPlan) -> None:
    moved = replace(plan, local=(*plan.local, plan.rounds[0][0]), rounds=(plan.rounds[0][1:], *plan.rounds[1:]))
    with pytest.raises(PlanError, match="between two ranks"):
        moved.check()


def test_fetch_of_what_the_own_slot_holds() -> None:
    tensor = TensorSpec("param", "w", (4, 4), "float32", 4)
    layout = (Shard(tensor, Box.whole(tensor.shape)),)
    plan = make_plan({0: layout, 1: layout}, {0: layout}, {0: "a", 1: "a"})
    fetched = replace(plan, local=(), rounds=((replace(plan.local[0], src_rank=1),),))
    with pytest.raises(PlanError, match="own slot holds"):
        fetched.check()


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
    plan = make_plan(source, {1: (Shard(tensor, Box.whole((3, 3))),)}, {0: "a", 1: "a"})
    plan.check()
    (moves,) = plan.rounds
    larger = [replace(m, src_shard=0, box=Box((0, 0), (1, 2)), nbytes=2) if m.box == blades[2] else m for m in moves]
    with pytest.raises(PlanError, match="written twice"):
        replace(plan, rounds=(tuple(larger),)).check()


def test_error_survives_a_pickle() -> None:
    error = PlanError("why", (1, 2), ("param", "w"), Box((0,), (1,)))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "why; tensor param w; offsets (0,) lengths (1,); ranks 1, 2"
    assert (again.ranks, again.tensor, again.box) == (error.ranks, error.tensor, error.box)
