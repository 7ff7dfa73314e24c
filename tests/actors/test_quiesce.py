"""How a generation comes to stand still, with ranks that only answer."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from ray_etc.actors.errors import ResizeFailed
from ray_etc.actors.messages import Boundary
from ray_etc.actors.quiesce import pause
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


def test_no_resize_after_a_step_that_only_gathers_gradients() -> None:
    with pytest.raises(ResizeFailed, match="step 4 made no update of the weights, and gradients that wait for a later"):
        paused(rank(is_whole=False), rank(is_whole=False))
