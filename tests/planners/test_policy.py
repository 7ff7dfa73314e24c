"""Decisions, as a table of situations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.policy import Decision, Noop, Recover, Resize, Situation, decide

TP2 = ParallelConfig(tensor_parallel=2)
CALM = Situation(parallel=TP2, usable=(0, 1), at_least=2, at_most=8)


def largest(number: int) -> ParallelConfig | None:
    return TP2.with_world_size(number // 2 * 2) if number >= 2 else None


@pytest.mark.parametrize(
    ("situation", "decision"),
    [
        (CALM, Noop()),
        (replace(CALM, usable=(0, 1, 2)), Noop()),
        (replace(CALM, usable=(0, 1, 2, 3)), Resize((0, 1, 2, 3), TP2.with_world_size(4), "slots joined")),
        (replace(CALM, usable=(0, 1, 2, 3), at_most=2), Noop()),
        (replace(CALM, usable=(0, 1, 2, 3), is_settled=False), Noop("slots are still arriving")),
        (
            replace(CALM, parallel=TP2.with_world_size(4), usable=(0, 1), draining={2: 9.0, 3: 7.0}),
            Resize((0, 1), TP2, "node draining", 7.0),
        ),
        (replace(CALM, usable=(0, 1), requested=TP2), Resize((0, 1), TP2, "requested")),
        (replace(CALM, usable=(1, 2, 3), dead_ranks=(0,)), Recover((1, 2, 3), TP2, "rank 0 died")),
        (
            replace(CALM, usable=(1, 2, 3, 4), dead_ranks=(0,), warm=(1, 2, 3)),
            Recover((1, 2, 3), TP2, "rank 0 died"),
        ),
        (
            replace(CALM, usable=(1, 2, 3, 4), dead_ranks=(0,), warm=(1, 2, 3), at_least=4),
            Recover((1, 2, 3, 4), TP2.with_world_size(4), "rank 0 died"),
        ),
    ],
)
def test_decision(situation: Situation, decision: Decision) -> None:
    assert decide(situation, largest) == decision


@pytest.mark.parametrize(
    "situation",
    [
        replace(CALM, usable=(0,), draining={1: 5.0}),
        replace(CALM, usable=(0,), dead_ranks=(1,)),
        replace(CALM, usable=(0, 1), requested=TP2.with_world_size(4)),
    ],
)
def test_too_few_slots_is_said_with_the_number(situation: Situation) -> None:
    decision = decide(situation, largest)
    assert isinstance(decision, Noop)
    assert str(len(situation.usable)) in decision.why
