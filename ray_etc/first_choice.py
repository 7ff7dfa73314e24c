"""What a run begins with: the largest configuration that its slots allow, and whose replicas share the global batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ray.train import ScalingConfig

from ray_etc.actors.errors import BatchNotShared
from ray_etc.actors.generation import Generation, TrainJob
from ray_etc.actors.outcomes import Failed
from ray_etc.actors.slots import SlotPool
from ray_etc.choice import largest
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.requests import Aim
from ray_etc.watch import TICK_S, Stopped, Watch

logger = logging.getLogger(__name__)


class FirstChoice:
    """Of the configurations that `aim` allows, one for the slots that there are."""

    def __init__(self, job: TrainJob, scaling: ScalingConfig, aim: Aim, slots: SlotPool) -> None:
        self._job, self._scaling, self._aim, self._slots = job, scaling, aim, slots

    def await_slots(self, watch: Watch, has_settled: Callable[[], bool]) -> ParallelConfig:
        """Wait for as many slots as are wanted, or, once no more come, for as many as are needed.

        Raises:
            TimeoutError: fewer than are needed came in time.
            Stopped: the run was stopped meanwhile.
        """
        deadline = time.monotonic() + self._job.start_timeout_s
        aim, fewest = self._aim, max(1, self._scaling.min_workers)
        while True:
            watch.tick(TICK_S)
            if watch.stop_requested.is_set():
                raise Stopped
            usable = len(self._slots.usable)
            if usable >= aim.number or has_settled():
                parallel = largest(aim.chooser, min(usable, aim.number), lambda parallel: None)
                if parallel is not None and parallel.world_size >= fewest:
                    return parallel
            if time.monotonic() > deadline:
                numbers = range(fewest, aim.number + 1)
                needed = next((n for n in numbers if largest(aim.chooser, n, lambda parallel: None)), aim.number)
                fewer = "lower num_workers" if usable else "ask for less a worker (use_gpu, resources_per_worker)"
                raise TimeoutError(
                    f"{usable} slots of {self._job.resources} after {self._job.start_timeout_s:.0f} s, but "
                    f"num_workers={self._scaling.num_workers} needs {needed}: add nodes, or {fewer}"
                )

    def with_fewer_replicas(self, first: Generation) -> ParallelConfig | None:
        """What to begin with instead; None where that is too few, or where it failed for another reason."""
        errors = [outcome.error for outcome in first.outcomes.values() if isinstance(outcome, Failed)]
        refusals = [error for error in errors if isinstance(error, BatchNotShared)]
        if first.dead or not refusals or len(refusals) < len(errors):
            return None
        said, replicas = str(refusals[0]), refusals[0].replicas
        at_most = min(first.parallel.world_size - 1, len(self._slots.usable))
        fitting = largest(
            self._aim.chooser, at_most, lambda parallel: None if parallel.data_parallel in replicas else said
        )
        if fitting is None or fitting.world_size < self._scaling.min_workers:
            return None
        logger.warning(
            "begins with %s, on %d of %d slots: %s", fitting, fitting.world_size, len(self._slots.usable), said
        )
        return fitting
