"""The run's book: what ranks reported, by step, and the callbacks that hear of it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import ray
from ray.exceptions import RayActorError
from ray.train import Checkpoint, UserCallback, WorkerGroupError

from ray_etc.actors.generation import Generation
from ray_etc.actors.messages import Progress
from ray_etc.actors.outcomes import Failed
from ray_etc.actors.record import ResizeRecord
from ray_etc.results import ElasticCallback

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""How long a rank may take to hand in its last reports."""


class ReportBook:
    """Gathers reports from the ranks and passes them on to callbacks once every rank has reported."""

    def __init__(self, callbacks: Sequence[UserCallback], run_context: Any) -> None:
        self.reports: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(dict)
        self.latest: dict[str, Any] | None = None
        self.latest_step = -1
        self.checkpoints: list[tuple[Checkpoint, dict[str, Any]]] = []
        self._callbacks = list(callbacks)
        self._run_context = run_context
        self._polls: dict[int, dict[int, ray.ObjectRef]] = {}
        self._progress: dict[int, list[Progress | None]] = {}

    def poll(self, generation: Generation, wait: bool) -> list[Progress | None]:
        """Each rank's last known progress. One question a rank is under way at a time: a stuck rank costs nothing.

        With `wait`, every report that the ranks made until now is taken in, from those that still answer.
        """
        polls = self._polls.setdefault(generation.number, {})
        progress = self._progress.setdefault(generation.number, [None] * len(generation.ranks))
        # An answer that is under way may be older than the last report, so a last question comes after it.
        for _ in range(2 if wait else 1):
            for rank in generation.survivors():
                if rank not in polls:
                    polls[rank] = generation.ranks[rank].progress.remote()
            if not polls:
                break
            ready, _ = ray.wait(list(polls.values()), num_returns=len(polls), timeout=ANSWER_S if wait else 0)
            for rank in [rank for rank, ref in polls.items() if ref in ready]:
                try:
                    progress[rank] = ray.get(polls.pop(rank))
                except RayActorError:
                    continue
                self._take(rank, progress[rank], generation)
        return progress

    def _take(self, rank: int, progress: Progress | None, generation: Generation) -> None:
        for report in progress.reports if progress is not None else ():
            of_step = self.reports[report.step]
            of_step.setdefault(rank, []).append(report.metrics)
            if rank == 0 and report.step >= self.latest_step:
                self.latest, self.latest_step = report.metrics, report.step
            if rank == 0 and report.checkpoint is not None:
                self.checkpoints.append((report.checkpoint, report.metrics))
            index = len(of_step[rank]) - 1
            if all(len(of_step.get(other, ())) > index for other in range(len(generation.ranks))):
                metrics = [of_step[other][index] for other in range(len(generation.ranks))]
                checkpoint = next((made for made, of in reversed(self.checkpoints) if of is metrics[0]), None)
                self._tell(partial(_after_report, self._run_context, metrics, checkpoint))

    def void_from(self, next_step: int | None) -> None:
        """Forget reports of steps that will be trained again: the step before `next_step` was the last whole one."""
        for step in [step for step in self.reports if next_step is not None and step >= next_step]:
            del self.reports[step]
        if next_step is not None and self.latest_step >= next_step:
            self.latest_step = next_step - 1
            self.latest = self.reports[self.latest_step].get(0, [self.latest])[-1]

    def before_resize(self, record: ResizeRecord) -> None:
        """Tell callbacks that a resize was decided."""
        self._tell(lambda callback: callback.before_resize(record) if isinstance(callback, ElasticCallback) else None)

    def after_resize(self, record: ResizeRecord) -> None:
        """Tell callbacks that a resize is over."""
        self._tell(lambda callback: callback.after_resize(record) if isinstance(callback, ElasticCallback) else None)

    def _tell(self, tell: Callable[[UserCallback], Any]) -> None:
        """A callback that raises must not break a resize in the middle."""
        for callback in self._callbacks:
            try:
                tell(callback)
            except Exception:
                logger.exception("a callback raised; the run goes on")

    def raise_failure(self, failed: dict[int, Failed], generation: Generation) -> NoReturn:
        """End the run with the user's own error first, its rank and step named."""
        errors = {rank: outcome.error for rank, outcome in failed.items()}
        self._tell(lambda callback: callback.after_exception(self._run_context, errors))
        rank = min(failed)
        outcome = failed[rank]
        where = f"step {outcome.step}" if outcome.step is not None else "before its first step"
        message = (
            f"{type(outcome.error).__name__}: {outcome.error}\nraised on rank {rank} "
            f"({generation.parallel.coordinate(rank)}) of generation {generation.number}, {where}:\n{outcome.traceback}"
        )
        raise WorkerGroupError(message, errors) from outcome.error


def _after_report(
    run_context: Any, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None, callback: UserCallback
) -> None:
    callback.after_report(run_context, metrics, checkpoint)
