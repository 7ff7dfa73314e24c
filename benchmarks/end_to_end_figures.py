"""The figures of `benchmarks.end_to_end`, made of the moments at which steps started and ended."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

SETTLING_STEPS = 10
"""Of a new generation: later ones say what is normal."""
NORMAL = 1.05
"""A step is back to normal from this multiple of the normal time on down."""


@dataclass(frozen=True)
class Step:
    """One step of all ranks: it starts, and ends, with the last of them. Moments are Unix times in seconds.

    `waited_s`: how long threads of its process were ready to run but had no processor, together.
    """

    number: int
    started_at: float
    ended_at: float
    loss: float
    waited_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at


def of_all_ranks(ranks: Iterable[Step]) -> Step:
    """One step, from what each rank says of it."""
    steps = list(ranks)
    first = steps[0]
    started_at, ended_at, waited_s = (
        max(getattr(each, name) for each in steps) for name in ("started_at", "ended_at", "waited_s")
    )
    return Step(first.number, started_at, ended_at, first.loss, waited_s)


def normal_step_s(steps: Sequence[Step]) -> float | None:
    """The median of a generation's steps from the eleventh on; None where there are none."""
    later = [step.seconds for step in steps[SETTLING_STEPS:]]
    return statistics.median(later) if later else None


def back_to_normal(steps: Sequence[Step], paused_at: float) -> dict[str, Any]:
    """How a generation gets going after a pause: up to the first of two steps in a row that are normal."""
    normal_s = normal_step_s(steps)
    first: dict[str, Any] = {
        "first_steps_s": [step.seconds for step in steps[:SETTLING_STEPS]],
        "normal_step_s": normal_s,
        "steps_until_normal": None,
        "normal_after_s": None,
    }
    for index, pair in enumerate(pairwise(steps)):
        if normal_s is not None and all(step.seconds <= NORMAL * normal_s for step in pair):
            return first | {"steps_until_normal": index, "normal_after_s": pair[0].started_at - paused_at}
    return first


def shadow(alone: Sequence[Step], beside: Sequence[Step], began_at: Mapping[str, float]) -> dict[str, Any]:
    """Step time of a generation alone and beside the shadow of the next one; what was lost in each stage of that.

    `began_at`: when each stage began. A step counts for the stage in which it started.
    """
    if not alone or not beside:
        return {"shadow_steps": len(beside), "shadow_slowdown": None}
    normal_s = statistics.mean(step.seconds for step in alone)
    lost: dict[str, float] = {}
    for step in beside:
        _, stage = max(((at, stage) for stage, at in began_at.items() if at <= step.started_at), default=(0.0, "start"))
        lost[stage] = lost.get(stage, 0.0) + step.seconds - normal_s
    beside_s = statistics.mean(step.seconds for step in beside)
    return {
        "shadow_steps": len(beside),
        "shadow_s": sum(step.seconds for step in beside),
        "step_before_s": normal_s,
        "step_before_stdev_s": statistics.pstdev(step.seconds for step in alone),
        "step_beside_shadow_s": beside_s,
        "step_beside_shadow_max_s": max(step.seconds for step in beside),
        "shadow_lost_s": lost,
        "step_waited_before_s": statistics.mean(step.waited_s for step in alone),
        "step_waited_beside_shadow_s": statistics.mean(step.waited_s for step in beside),
        "steps_before": [[step.started_at, step.seconds] for step in alone],
        "steps_beside_shadow": [[step.started_at, step.seconds] for step in beside],
        "shadow_slowdown": beside_s / normal_s - 1.0,
    }


def largest_difference(losses: dict[int, float], others: dict[int, float]) -> float | None:
    """Of the steps that both have; None where there are none."""
    return max((abs(loss - others[step]) for step, loss in losses.items() if step in others), default=None)
