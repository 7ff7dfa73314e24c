"""`ElasticTrainer`: what a user makes, and `ElasticRun`: the handle on a run that goes on in the background."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig, TrainingFailedError, WorkerGroupError

from ray_etc.actors.generation import TrainJob
from ray_etc.actors.ray_internals import slot_resources, train_run_context
from ray_etc.actors.record import ResizeRecord
from ray_etc.choice import Chooser, as_chooser, require_trainable
from ray_etc.controller import Controller
from ray_etc.planners.links import Links
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.placement import preview
from ray_etc.planners.plan import MigrationPlan
from ray_etc.reports import ReportBook
from ray_etc.results import ElasticResult


@dataclass(frozen=True)
class RunStatus:
    """Where a run stands. `step` is the last one that rank 0 has reported, -1 before the first."""

    activity: str
    generation: int | None
    parallel: ParallelConfig | None
    step: int
    metrics: dict[str, Any] | None
    slots_usable: int
    slots_waiting: int
    slots_draining: int
    standbys_warm: int


class ElasticTrainer:
    """Trains on a Ray cluster whose nodes come and go, in the style of Ray Train.

    Args:
        train_loop_per_worker: runs on every rank, from its top in each generation; iterates over `ray_etc.steps`.
        train_loop_config: passed to it.
        parallel: how ranks are used: a `ParallelConfig` whose data-parallel axis is filled up to the number of
            ranks, or a function from a number of ranks to a `ParallelConfig` (ValueError where there is none).
        scaling_config: `num_workers=(min, max)` bounds the ranks; the resources of a worker are those of a slot, and
            each generation takes half of it. Nodes are noticed within a second, so
            `elastic_resize_monitor_interval_s` is not used.
        run_config: name, callbacks and the workers' runtime environment. Nothing is written to its storage: a
            checkpoint stays where the train loop wrote it, and all are kept. Its failure configuration has nothing to
            bound yet: a death whose state the survivors hold loses no step, and any other ends the run.
        timeout_s: for each single step of a handover. A peer that is silent for longer makes it fail, and the old
            generation goes on. A resize whose move takes longer at the speeds of `links` is refused before the pause.
        start_timeout_s: for slots to become available, and for a generation to build its model.
        slot_nbytes: what all processes in a slot may have of its memory together; by default all of a GPU, and as much
            as they want on CPUs. Where the old state and the new one do not fit into it together, a resize releases
            the old one phase by phase; where that does not fit either, it is refused before anything starts.
        links: how fast bytes travel between the slots, a table or the file that `ray_etc calibrate` wrote: it decides
            how large a slice goes without packing, and how long a move is expected to take.
        warm_standbys: keep one process a slot that has imported everything, without a CUDA context, so that the next
            generation need not wait for that: after a death nobody trains meanwhile. Costs about 1 GB of host memory
            a slot.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        parallel: ParallelConfig | Chooser | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        timeout_s: float = 30.0,
        start_timeout_s: float = 120.0,
        slot_nbytes: int | None = None,
        links: Links | str | Path | None = None,
        warm_standbys: bool = False,
    ) -> None:
        self.train_loop_per_worker = train_loop_per_worker
        self.train_loop_config = train_loop_config
        self.chooser = as_chooser(parallel)
        self.scaling_config = scaling_config or ScalingConfig()
        self.run_config = run_config or RunConfig()
        self.timeout_s, self.start_timeout_s, self.slot_nbytes = timeout_s, start_timeout_s, slot_nbytes
        self.links = Links.load(Path(links)) if isinstance(links, str | Path) else links or Links()
        self.warm_standbys = warm_standbys
        if (gpus := slot_resources(self.scaling_config).get("GPU", 0.0)) > 1:
            raise ValueError(f"{gpus:g} GPUs a worker: a rank trains on one; use at most 1 in resources_per_worker")
        for name in ("timeout_s", "start_timeout_s", "slot_nbytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or value <= 0):
                raise ValueError(f"{name}={value!r} must be a number above 0")
        smallest, most = max(1, self.scaling_config.min_workers), self.scaling_config.max_workers
        if (
            isinstance(parallel, ParallelConfig)
            and most // parallel.model_parallel * parallel.model_parallel < smallest
        ):
            raise ValueError(
                f"num_workers={self.scaling_config.num_workers} has no multiple of tensor_parallel="
                f"{parallel.tensor_parallel} x pipeline_parallel={parallel.pipeline_parallel} = "
                f"{parallel.model_parallel} ranks; raise num_workers or use smaller axes"
            )

    def fit(self) -> ElasticResult:
        """Train to the end.

        Raises:
            TrainingFailedError: with the user's own error first where the train loop raised one.
        """
        return self.start().result()

    def start(self) -> ElasticRun:
        """Train in the background, on the Ray that the process is connected to (one of its own where there is none)."""
        if not ray.is_initialized():
            ray.init()
        return ElasticRun(self)


class ElasticRun:
    """A run that goes on in the background."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        name = trainer.run_config.name or f"ray_etc_{uuid.uuid4().hex[:8]}"
        self.path = str(Path(trainer.run_config.storage_path or "~/ray_results").expanduser() / name)
        job = TrainJob(
            name,
            trainer.train_loop_per_worker,
            trainer.train_loop_config,
            slot_resources(trainer.scaling_config),
            dict(trainer.run_config.worker_runtime_env or {}),
            trainer.timeout_s,
            trainer.start_timeout_s,
            trainer.slot_nbytes,
            trainer.links,
        )
        context = train_run_context(trainer.run_config, trainer.train_loop_config, trainer.scaling_config)
        self._book = ReportBook(trainer.run_config.callbacks or [], context)
        self._controller = Controller(job, trainer.chooser, trainer.scaling_config, self._book, trainer.warm_standbys)
        self._scaling = trainer.scaling_config
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"ray_etc {name}", daemon=True)
        self._thread.start()

    @property
    def resizes(self) -> list[ResizeRecord]:
        """One record a resize so far."""
        return list(self._controller.records)

    @property
    def reports(self) -> dict[int, dict[int, list[dict[str, Any]]]]:
        """What was reported so far: {step: {rank: [metrics, ...]}}."""
        return dict(self._book.reports)

    def status(self) -> RunStatus:
        """Where the run stands now."""
        controller = self._controller
        current = controller.current
        return RunStatus(
            activity=controller.activity,
            generation=current.number if current else None,
            parallel=current.parallel if current else None,
            step=self._book.latest_step,
            metrics=self._book.latest,
            slots_usable=len(controller.slots.usable),
            slots_waiting=len(controller.slots.waiting),
            slots_draining=len(controller.slots.draining),
            standbys_warm=len(controller.watch.standbys.pids),
        )

    def plan(self, num_workers: int | None = None, *, parallel: ParallelConfig | None = None) -> MigrationPlan:
        """What a resize would move, before anything starts. An estimate: no rank has reported its layout yet.

        Slots that are not there yet are taken to be on a node of their own.
        """
        if self._controller.activity == "ended":
            raise RuntimeError("the run has ended, so nothing would move")
        target = self._target(num_workers, parallel)
        held = self._controller.held()
        if not held:
            raise RuntimeError("nothing is trained yet, so nothing would move; wait for the first step")
        usable = {slot.slot_id: slot.node_name for slot in self._controller.slots.usable}
        nodes = {slot_id: self._controller.slots[slot_id].node_name for slot_id in held}
        for missing in range(1, target.world_size - len(usable) + 1):
            usable[-missing] = "a new node"
        return preview(held, target, usable, nodes)

    def resize(
        self, num_workers: int | None = None, *, parallel: ParallelConfig | None = None, timeout_s: float = 300.0
    ) -> ResizeRecord:
        """Move to another number of ranks, or to another configuration, and wait until that has happened.

        From then on this is what the trainer aims for: it asks Ray for so many slots, and shrinks and grows along
        the data-parallel axis of this configuration. To the configuration that it has, it moves into new processes.

        Raises:
            ValueError: the state cannot live under that configuration; nothing was started.
            ResizeFailed: a slot has no room for it, or it was tried and given up; training goes on as before.
            TimeoutError: slots or a step boundary did not come in time.
        """
        target = self._target(num_workers, parallel)
        requests = self._controller.requests
        chooser = target.with_world_size if parallel is not None else requests.aim.chooser
        done = requests.ask(target, chooser)
        try:
            return done.result(timeout_s)
        except TimeoutError:
            requests.withdraw(done)
            raise TimeoutError(f"{target} was not reached within {timeout_s:.0f} s: {self.status().activity}") from None

    def stop(self) -> None:
        """End the run, in the middle of a step; `result` then returns what was reported so far."""
        self._controller.watch.stop_requested.set()

    def result(self, timeout_s: float | None = None) -> ElasticResult:
        """Wait for the end.

        Raises:
            TrainingFailedError: the run failed.
            TimeoutError: it goes on after `timeout_s`.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the run goes on after {timeout_s} s, at step {self._book.latest_step}")
        if self._error is not None:
            raise self._error
        return self._result()

    def _target(self, num_workers: int | None, parallel: ParallelConfig | None) -> ParallelConfig:
        if (num_workers is None) == (parallel is None):
            raise ValueError("give either num_workers or parallel")
        if num_workers is not None and not isinstance(num_workers, int):
            raise TypeError(f"num_workers={num_workers!r} is no whole number; a configuration goes into parallel=")
        target = parallel if parallel is not None else self._controller.requests.aim.chooser(num_workers or 0)
        require_trainable(target)
        low, high = self._scaling.min_workers, self._scaling.max_workers
        if not low <= target.world_size <= high:
            allowed = f"num_workers={self._scaling.num_workers} allows {low} to {high}"
            raise ValueError(f"{target} needs {target.world_size} ranks, {allowed}")
        problem = self._controller.check(target)
        if problem is not None:
            raise ValueError(problem)
        return target

    def _run(self) -> None:
        try:
            self._value = self._controller.run()
        except TrainingFailedError as error:
            self._error = error
        except BaseException as error:
            failure = WorkerGroupError(f"{type(error).__name__}: {error}", {})
            failure.__cause__ = error
            self._error = failure

    def _result(self) -> ElasticResult:
        import pandas

        rows = [
            {"step": step, **metrics}
            for step, by_rank in sorted(self._book.reports.items())
            for metrics in by_rank.get(0, ())
        ]
        return ElasticResult(
            metrics=self._book.latest,
            checkpoint=self._book.checkpoints[-1][0] if self._book.checkpoints else None,
            error=None,
            path=self.path,
            metrics_dataframe=pandas.DataFrame(rows),
            best_checkpoints=list(self._book.checkpoints),
            return_value=self._value,
            resizes=self.resizes,
            reports=self.reports,
        )
