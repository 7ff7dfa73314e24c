"""The run's book: what ranks reported, by step, and the callbacks that hear of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import RayActorError
from ray.train import UserCallback, WorkerGroupError

from ray_etc.actors.generation import Generation
from ray_etc.actors.rank import Failed
from ray_etc.actors.record import ResizeRecord
from ray_etc.actors.session import Progress
from ray_etc.results import ElasticCallback


class ReportBook:
    """Gathers reports from the ranks and passes them on to callbacks once every rank has reported."""

    def __init__(self, callbacks: Sequence[UserCallback], run_context: Any) -> None:
        self.reports: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(dict)
        self.latest: dict[str, Any] | None = None
        self.latest_step = -1
        self._callbacks = list(callbacks)
        self._run_context = run_context
        self._polls: dict[int, dict[int, ray.ObjectRef]] = {}
        self._progress: dict[int, list[Progress | None]] = {}

    def poll(self, generation: Generation, wait: bool) -> list[Progress | None]:
        """Each rank's last known progress. One question a rank is under way at a time: a stuck rank costs nothing."""
        polls = self._polls.setdefault(generation.number, {})
        progress = self._progress.setdefault(generation.number, [None] * len(generation.ranks))
        for rank in generation.survivors():
            if rank not in polls:
                polls[rank] = generation.ranks[rank].progress.remote()
        ready, _ = (
            ray.wait(list(polls.values()), num_returns=len(polls), timeout=5.0 if wait else 0) if polls else ([], [])
        )
        for rank, ref in list(polls.items()):
            if ref not in ready:
                continue
            del polls[rank]
            try:
                progress[rank] = ray.get(ref)
            except RayActorError:
                continue
            self._take(rank, progress[rank], generation)
        if wait and not polls:
            self._last_questions(generation)
        return progress

    def _last_questions(self, generation: Generation) -> None:
        """An answer that was under way may be older than the last report: ask once more."""
        refs = {rank: generation.ranks[rank].progress.remote() for rank in generation.survivors()}
        ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=5.0)
        for rank, ref in refs.items():
            if ref in ready:
                try:
                    self._take(rank, ray.get(ref), generation)
                except RayActorError:
                    continue

    def _take(self, rank: int, progress: Progress | None, generation: Generation) -> None:
        for report in progress.reports if progress is not None else ():
            of_step = self.reports[report.step]
            of_step.setdefault(rank, []).append(report.metrics)
            if rank == 0 and report.step >= self.latest_step:
                self.latest, self.latest_step = report.metrics, report.step
            index = len(of_step[rank]) - 1
            if all(len(of_step.get(other, ())) > index for other in range(len(generation.ranks))):
                metrics = [of_step[other][index] for other in range(len(generation.ranks))]
                for callback in self._callbacks:
                    callback.after_report(self._run_context, metrics, None)

    def start_generation(self, generation: Generation, next_step: int | None) -> None:
        """Reports of steps that the new generation does again are void: the step before was the last whole one."""
        for step in [step for step in self.reports if next_step is not None and step >= next_step]:
            del self.reports[step]

    def before_resize(self, record: ResizeRecord) -> None:
        for callback in self._callbacks:
            if isinstance(callback, ElasticCallback):
                callback.before_resize(record)

    def after_resize(self, record: ResizeRecord) -> None:
        for callback in self._callbacks:
            if isinstance(callback, ElasticCallback):
                callback.after_resize(record)

    def raise_failure(self, failed: dict[int, Failed], generation: Generation) -> NoReturn:
        """End the run with the user's own error first, its rank and step named."""
        errors = {rank: outcome.error for rank, outcome in failed.items()}
        for callback in self._callbacks:
            callback.after_exception(self._run_context, errors)
        rank = min(failed)
        outcome = failed[rank]
        where = f"step {outcome.step}" if outcome.step is not None else "before its first step"
        message = (
            f"{type(outcome.error).__name__}: {outcome.error}\nraised on rank {rank} "
            f"({generation.parallel.coordinate(rank)}) of generation {generation.number}, {where}:\n{outcome.traceback}"
        )
        raise WorkerGroupError(message, errors) from outcome.error
