"""How a generation comes to stand still, with ranks that only answer."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_session import start, state_of

from ray_etc.actors.errors import ResizeFailed
from ray_etc.actors.messages import Boundary
from ray_etc.actors.quiesce import freeze, pause
from ray_etc.actors.small_state import SmallState


def rank(**boundary: Any) -> Any:
    """One that is before step 3, agrees to everything, and stands at that boundary."""
    answers = {
        "next_step": 3,
        "propose_last_step": True,
        "wait_paused": Boundary(5, SmallState(pickle.dumps({}), pickle.dumps({})), 0.0, **boundary),
    }
    calls = {name: SimpleNamespace(remote=lambda *_, answer=answer: answer) for name, answer in answers.items()}
    return SimpleNamespace(**calls)


def paused(*ranks: Any) -> dict[int, Boundary]:
    generation: Any = SimpleNamespace(ranks=ranks)
    return pause(generation, lambda answers, *_: answers, 1.0)


def test_ranks_that_have_made_their_update() -> None:
    assert [boundary.next_step for boundary in paused(rank(), rank()).values()] == [5, 5]


def test_no_resize_of_a_run_that_only_gathers_gradients() -> None:
    with pytest.raises(ResizeFailed, match="step 4 and those after it made no update of the weights"):
        paused(rank(is_whole=False), rank(is_whole=False))


OF_NOTHING: list[Any] = [{"params": []}]


def updating_every(number: int, *optimized: Any, is_empty: bool = False, steps: int = 0) -> Any:
    """A rank whose steps only gather gradients but for each `number`th; it is in the step after the first `steps`.

    An empty one has nothing to update, and no optimizer; one of `OF_NOTHING` has an optimizer all the same.
    """
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizers = [] if is_empty else [torch.optim.SGD(optimized or [weight], lr=1.0)]

    def body(step: int) -> None:
        if (step + 1) % number == 0:
            for optimizer in optimizers:
                optimizer.step()

    loop = start(state_of(weight, *optimizers), body)
    for _ in range(steps):
        loop.step()

    def wait_paused(timeout_s: float) -> Boundary:
        loop.go.release(2)
        return loop.session.wait_paused(timeout_s)

    calls = {
        "next_step": loop.session.next_step,
        "propose_last_step": loop.session.propose_last_step,
        "wait_paused": wait_paused,
        "freeze": loop.session.freeze,
    }
    return SimpleNamespace(**{name: SimpleNamespace(remote=call) for name, call in calls.items()})


@pytest.mark.parametrize(("number", "next_step"), [(1, 2), (2, 2), (3, 3), (5, 5)])
def test_the_last_step_is_one_with_an_update(number: int, next_step: int) -> None:
    """Also for a rank that has nothing to update, and stands well after every step."""
    ranks = [updating_every(number), updating_every(number, is_empty=True)]
    assert [boundary.next_step for boundary in paused(*ranks).values()] == [next_step] * 2


def test_no_resize_where_no_update_comes_before_the_end() -> None:
    with pytest.raises(ResizeFailed, match="step 1 and those after it made no update of the weights"):
        paused(updating_every(200))


@pytest.mark.parametrize("optimized", [[], OF_NOTHING], ids=["a weight", "nothing"])
def test_survivors_between_two_updates_stand_where_the_last_one_was(optimized: list[Any]) -> None:
    """Also a rank that has nothing to update: else it would count as the newest, and the others as of no use."""
    ranks = [updating_every(3, steps=5), updating_every(3, *optimized, steps=5)]
    generation: Any = SimpleNamespace(ranks=ranks, survivors=lambda: [0, 1])
    frozen = freeze(generation, lambda answers, *_: answers, 1.0)
    assert {rank: boundary.next_step for rank, boundary in frozen.items()} == {0: 3, 1: 3}
