"""What a run returns, and the callbacks that hear of resizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ray.train import Result, UserCallback

from ray_etc.actors.record import ResizeRecord


@dataclass
class ElasticResult(Result):
    """Ray Train's `Result`, and beside it what happened on the way.

    `checkpoint` is the last one that rank 0 reported, `best_checkpoints` all of them, in order.

    Attributes:
        resizes: one record a resize, in order, those that failed too.
        reports: by step, what each rank reported: {step: {rank: [metrics, ...]}}.
    """

    resizes: list[ResizeRecord] = field(default_factory=list)
    reports: dict[int, dict[int, list[dict[str, Any]]]] = field(default_factory=dict)


class ElasticCallback(UserCallback):
    """Ray Train's `UserCallback` (after_report, after_exception), which also hears of resizes."""

    def before_resize(self, record: ResizeRecord) -> None:
        """A resize was decided; its generation is about to be started in the shadow."""

    def after_resize(self, record: ResizeRecord) -> None:
        """A resize was committed and measured, or given up (then `record.error` says why)."""
