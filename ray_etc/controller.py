"""The run's own thread: it watches Ray and the ranks, lets the policy decide, and carries the decision out.

Everything happens in this one thread, one thing after the other. While a step of a resize waits for Ray, `_wait`
keeps watching, and ends the wait as soon as the resize has become pointless.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.train import ScalingConfig

from ray_etc.actors.errors import ResizeFailed, StateLost
from ray_etc.actors.generation import Generation, TrainJob
from ray_etc.actors.handover import Handover, start_generation
from ray_etc.actors.rank import Failed, Finished
from ray_etc.actors.ray_internals import is_about, label_selector
from ray_etc.actors.record import ResizeRecord
from ray_etc.actors.slots import Slot, SlotPool
from ray_etc.actors.watcher import ClusterWatcher
from ray_etc.choice import Chooser, largest
from ray_etc.planners.layout import RankLayout, TensorSpec
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.placement import known_tensors, place
from ray_etc.planners.policy import Noop, Recover, Resize, Situation, decide
from ray_etc.reports import ReportBook

logger = logging.getLogger(__name__)

TICK_S = 0.05
SETTLE_S = 1.0
"""A node's slots come one by one: wait so long after the last before growing, and take them together."""
RETRY_S = 10.0
"""After a resize that failed, wait so long before the next that nobody asked for."""
LEAVE_S = 5.0
"""How long the `finally` blocks of a replaced train loop may take."""
MOST_RECOVERIES = 3
"""So often may the recovery from one death fail before the run ends."""
PEER_DEATH_S = 20.0
"""How long after an error in a collective Ray may need to notice that a peer is dead."""


@dataclass(frozen=True)
class Request:
    """A configuration that the user asked for, and what was aimed for before, should it fail."""

    parallel: ParallelConfig
    done: Future[ResizeRecord]
    wanted_before: int
    chooser_before: Chooser


class RunEnded(Exception):  # noqa: N818
    """The running generation ended, by itself or by an error, while something waited."""


class Controller:
    """Runs generations until one has trained to the end. `run` is the thread; the rest is read by others."""

    def __init__(self, job: TrainJob, chooser: Chooser, scaling: ScalingConfig, book: ReportBook) -> None:
        self.job, self.chooser, self.scaling, self.book = job, chooser, scaling, book
        self.slots = SlotPool(job.resources, label_selector(scaling))
        self.current: Generation | None = None
        self.preparing: Generation | None = None
        self.tensors: list[TensorSpec] = []
        self.records: list[ResizeRecord] = []
        self.activity = "starting"
        self.wanted = scaling.max_workers
        self._watcher = ClusterWatcher()
        self._request: Request | None = None
        self._request_lock = threading.Lock()
        self._stop = threading.Event()
        self._leaving: list[tuple[Generation, float]] = []
        self._not_before = 0.0
        self._unmeasured: ResizeRecord | None = None
        self._recoveries_failed = 0
        self._checked: dict[ParallelConfig, str | None] = {}

    # Called from other threads ---------------------------------------------------------------------------------------

    def request(self, parallel: ParallelConfig, chooser: Chooser) -> Future[ResizeRecord]:
        """Ask for a configuration; from now on `chooser` says what follows when slots come and go."""
        done: Future[ResizeRecord] = Future()
        with self._request_lock:
            if self._request is not None:
                raise ResizeFailed(f"a resize to {self._request.parallel} is already asked for")
            self._request = Request(parallel, done, self.wanted, self.chooser)
            self.wanted, self.chooser = parallel.world_size, chooser
        return done

    def withdraw(self, done: Future[ResizeRecord]) -> None:
        """Take a request back that has not been answered."""
        with self._request_lock:
            if self._request is not None and self._request.done is done:
                self._forget_request()

    def stop(self) -> None:
        self._stop.set()

    def usable_slots(self) -> list[Slot]:
        return self.slots.usable

    def held(self) -> dict[int, RankLayout]:
        return self.current.layouts() if self.current is not None and self.current.entered else {}

    # The thread ------------------------------------------------------------------------------------------------------

    def run(self) -> Any:
        """Train to the end; returns what rank 0's loop returned, or raises why it could not."""
        try:
            self._start_first_generation()
            while not self._stop.is_set():
                self._watch(TICK_S)
                assert self.current is not None
                if self.current.outcomes and not self.current.dead:
                    ended = self._ended()
                    if ended is not None:
                        return ended.value
                match decide(self._situation(), self._largest):
                    case Resize() as resize:
                        self._resize(resize)
                    case Recover() as recover:
                        self._recover(recover)
                    case Noop(why):
                        self.activity = f"training; {why}" if why else "training"
            return None
        finally:
            self._close()

    def _start_first_generation(self) -> None:
        self.activity = "waiting for slots"
        deadline = time.monotonic() + self.job.start_timeout_s
        parallel = None
        while parallel is None:
            self._watch(TICK_S)
            usable = len(self.slots.usable)
            settled = time.monotonic() - self.slots.last_change > SETTLE_S or usable >= self.wanted
            if usable >= max(1, self.scaling.min_workers) and settled:
                parallel = largest(self.chooser, min(usable, self.wanted), lambda parallel: None)
            if parallel is None and time.monotonic() > deadline:
                raise TimeoutError(
                    f"{usable} slots of {self.job.resources} after {self.job.start_timeout_s:.0f} s, but "
                    f"num_workers={self.scaling.num_workers} needs {self._fewest()}: add nodes, or lower num_workers"
                )
        slots = self.slots.usable
        chosen = place([], {}, parallel, {slot.slot_id: slot.node_name for slot in slots}).slot_of_rank
        self.activity = f"starting {parallel}"
        self.current = Generation.create(0, parallel, [self.slots[slot_id] for slot_id in chosen], self.job)
        try:
            start_generation(self.current, self.job, self._wait)
        except RunEnded:
            self._ended()
            raise
        self.tensors = known_tensors(list(self.current.layouts().values()))
        for rank in self.current.ranks:
            rank.begin.remote(0)

    def _resize(self, resize: Resize) -> None:
        assert self.current is not None
        old = self.current
        record = ResizeRecord(old.number + 1, resize.reason, old.parallel, resize.parallel, resize.deadline)
        handover = None
        try:
            with record.phase("prepare"):
                new = self._prepare(resize.slots, record)
            handover = Handover(old, new, resize.slots, self.job, self._wait, record)
            handover.carry_out()
            self._commit(new, record)
        except Exception as error:
            if handover is not None:
                handover.abort()
            elif self.preparing is not None:
                self.preparing.kill()
            self.preparing = None
            self._not_before = time.monotonic() + (1.0 if resize.deadline else RETRY_S)
            self._give_up(record, error)

    def _recover(self, recover: Recover) -> None:
        assert self.current is not None
        old = self.current
        record = ResizeRecord(old.number + 1, recover.reason, old.parallel, recover.parallel)
        try:
            with record.phase("prepare"):
                new = self._prepare(recover.slots, record)
            Handover(old, new, recover.slots, self.job, self._wait, record).carry_out()
            self._commit(new, record)
            self._recoveries_failed = 0
        except Exception as error:
            # The survivors stay where they are, so it can be tried again, unless what is missing is lost for good.
            if self.preparing is not None:
                self.preparing.kill()
            self.preparing = None
            self._recoveries_failed += 1
            self._give_up(record, error)
            if isinstance(error, StateLost) or self._stop.is_set() or self._recoveries_failed >= MOST_RECOVERIES:
                raise

    def _prepare(self, slot_ids: Sequence[int], record: ResizeRecord) -> Generation:
        """Start the next generation in the shadow, its ranks where most of their state already is."""
        assert self.current is not None
        self.records.append(record)
        self.book.before_resize(record)
        self.activity = f"preparing {record.parallel_to} ({record.reason})"
        logger.info(
            "generation %d: %s -> %s, %s", record.generation, record.parallel_from, record.parallel_to, record.reason
        )
        nodes = {slot_id: self.slots[slot_id].node_name for slot_id in slot_ids if slot_id in self.slots}
        held = {
            self.current.slots[rank].slot_id: self.current.entered[rank].layout for rank in self.current.survivors()
        }
        chosen = place(self.tensors, held, record.parallel_to, nodes).slot_of_rank
        slots = [self.slots[slot_id] for slot_id in chosen]
        self.preparing = Generation.create(record.generation, record.parallel_to, slots, self.job)
        start_generation(self.preparing, self.job, self._wait)
        return self.preparing

    def _commit(self, new: Generation, record: ResizeRecord) -> None:
        assert self.current is not None
        old, self.current, self.preparing = self.current, new, None
        self.book.start_generation(new, record.next_step)
        self._collect(old, wait=True)
        for rank in old.survivors():
            old.ranks[rank].replace.remote()
        self._leaving.append((old, time.monotonic() + LEAVE_S))
        self._unmeasured = record

    def _give_up(self, record: ResizeRecord, error: Exception) -> None:
        record.error = f"{type(error).__name__}: {error}"
        logger.warning("generation %d was given up: %s", record.generation, record.error)
        self.book.after_resize(record)
        self._answer_request(record, error)

    def _answer_request(self, record: ResizeRecord, error: Exception | None = None) -> None:
        with self._request_lock:
            request = self._request
            if request is None or record.reason != "requested" or record.parallel_to != request.parallel:
                return
            if error is not None:
                self._forget_request()
                request.done.set_exception(ResizeFailed(record.error))
            else:
                self._request = None
                request.done.set_result(record)

    def _forget_request(self) -> None:
        """Aim again for what was aimed for before the request; the lock is held."""
        assert self._request is not None
        self.wanted, self.chooser = self._request.wanted_before, self._request.chooser_before
        self._request = None

    # Watching --------------------------------------------------------------------------------------------------------

    def _wait(self, refs: Sequence[ray.ObjectRef], timeout_s: float, what: str) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        waiting = list(refs)
        known_deaths = len(self.current.dead) if self.current else 0
        endangered = {slot.slot_id for slot in self.slots.draining}
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=TICK_S)
            for ref in done:
                try:
                    ray.get(ref)  # raises what the call raised
                except RayActorError as death:
                    self._take_death(death)
                    self._check_still_worth_it(known_deaths, endangered)
                    raise
            if not waiting:
                break
            self._watch(0.0)
            self._check_still_worth_it(known_deaths, endangered)
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        return ray.get(list(refs))

    def _take_death(self, death: RayActorError) -> None:
        """Note whose death a failed call tells of; its train loop's outcome would say so a moment later."""
        for generation in filter(None, (self.current, self.preparing)):
            for rank, actor in enumerate(generation.ranks):
                if is_about(death, actor):
                    self._note_death(generation, rank, death)

    def _note_death(self, generation: Generation, rank: int, death: Exception) -> None:
        """No rank is put in the slot again: Ray may take a while to see that the whole node is gone."""
        generation.dead[rank] = death
        slot_id = generation.slots[rank].slot_id
        if generation is self.current and slot_id in self.slots:
            self.slots.mark_dead(slot_id)

    def _check_still_worth_it(self, known_deaths: int, endangered: set[int]) -> None:
        assert self.current is not None
        if len(self.current.dead) > known_deaths:
            raise RunEnded(f"rank {sorted(self.current.dead)[-1]} died")
        if self.current.outcomes and not self.current.dead:
            raise RunEnded("the train loop ended")
        if self._stop.is_set():
            raise RunEnded("the run was stopped")
        if self.preparing is None:
            return
        for rank in self.preparing.dead:
            raise ResizeFailed(f"rank {rank} of the new generation died")
        for rank, outcome in self.preparing.outcomes.items():
            why = (
                outcome.traceback.strip() if isinstance(outcome, Failed) else "its train loop returned without training"
            )
            raise ResizeFailed(f"rank {rank} under {self.preparing.parallel} could not be built: {why}")
        for slot in self.preparing.slots:
            if slot.is_dead or (slot.is_draining and slot.slot_id not in endangered):
                raise ResizeFailed(f"a node of the new generation {'died' if slot.is_dead else 'began to drain'}")

    def _watch(self, timeout_s: float) -> None:
        """Take in what has happened: outcomes, nodes, slots, reports; and let go of generations that have left."""
        self._take_outcomes(timeout_s)
        self.slots.poll(self._watcher.poll())
        self.slots.want(self.wanted, {slot_id for generation in self._generations() for slot_id in generation.slot_ids})
        for left, deadline in list(self._leaving):
            gone, _ = ray.wait(left.outcome_refs, num_returns=len(left.outcome_refs), timeout=0)
            if len(gone) == len(left.outcome_refs) or time.monotonic() > deadline:
                left.kill()
                self._leaving.remove((left, deadline))
        if self.current is not None and self.current.entered:
            self._collect(self.current)

    def _generations(self) -> list[Generation]:
        """All that have processes, also those that are on their way out."""
        return [*filter(None, (self.current, self.preparing)), *(left for left, _ in self._leaving)]

    def _take_outcomes(self, timeout_s: float) -> None:
        """What has come of train loops; waits so long for the first news."""
        open_refs = {
            ref: (generation, rank)
            for generation in filter(None, (self.current, self.preparing))
            for rank, ref in enumerate(generation.outcome_refs)
            if rank not in generation.outcomes and rank not in generation.dead
        }
        if not open_refs:
            time.sleep(timeout_s)
            return
        ray.wait(list(open_refs), num_returns=1, timeout=timeout_s)
        done, _ = ray.wait(list(open_refs), num_returns=len(open_refs), timeout=0)
        for ref in done:
            generation, rank = open_refs[ref]
            try:
                generation.outcomes[rank] = ray.get(ref)
            except RayActorError as error:
                self._note_death(generation, rank, error)

    def _collect(self, generation: Generation, wait: bool = False) -> None:
        """Gather the ranks' reports; each is handed out once. Without `wait`, only what is there already."""
        progress = self.book.poll(generation, wait)
        record = self._unmeasured
        if (
            record is None
            or generation is not self.current
            or any(p is None or p.first_step_s is None for p in progress)
        ):
            return
        started = max(p.first_step_started_at or 0.0 for p in progress if p is not None)
        record.pause_s = started - (record.paused_at or started)
        record.phases["first_step"] = max(p.first_step_s or 0.0 for p in progress if p is not None)
        self._unmeasured = None
        self.book.after_resize(record)
        self._answer_request(record)

    # Deciding --------------------------------------------------------------------------------------------------------

    def _situation(self) -> Situation:
        assert self.current is not None
        may_grow = time.monotonic() > self._not_before and time.monotonic() - self.slots.last_change > SETTLE_S
        draining = {
            slot.slot_id: slot.deadline or time.time()
            for slot in self.slots.draining
            if slot.slot_id in self.current.slot_ids and time.monotonic() > self._not_before
        }
        with self._request_lock:
            requested = self._request.parallel if self._request is not None else None
        return Situation(
            parallel=self.current.parallel,
            usable=tuple(slot.slot_id for slot in self.slots.usable),
            draining=draining,
            dead_ranks=tuple(sorted(self.current.dead)),
            requested=requested if self._unmeasured is None else None,
            at_least=self.scaling.min_workers,
            at_most=self.wanted,
            is_settled=may_grow,
        )

    def check(self, parallel: ParallelConfig) -> str | None:
        """Why the state cannot live under `parallel`, or None; asked of a living rank, once for each configuration."""
        if parallel not in self._checked and self.current is not None:
            alive = self.current.ranks[self.current.survivors()[0]]
            self._checked[parallel] = ray.get(alive.check_parallel.remote(parallel), timeout=self.job.timeout_s)
        return self._checked.get(parallel)

    def _largest(self, at_most: int) -> ParallelConfig | None:
        return largest(self.chooser, at_most, self.check)

    def _fewest(self) -> int:
        return next(
            (
                n
                for n in range(max(1, self.scaling.min_workers), self.wanted + 1)
                if largest(self.chooser, n, lambda p: None)
            ),
            self.scaling.max_workers,
        )

    # Ending ----------------------------------------------------------------------------------------------------------

    def _ended(self) -> Finished | None:
        """What the generation came to; None while ranks still train, or where a peer's death explains an error."""
        assert self.current is not None
        failed = {rank: outcome for rank, outcome in self.current.outcomes.items() if isinstance(outcome, Failed)}
        if failed:
            self._await_peer_death(failed)
            if self.current.dead:
                return None
            self.book.raise_failure(failed, self.current)
        if len(self.current.outcomes) == len(self.current.ranks):
            self._collect(self.current, wait=True)
            first = self.current.outcomes[0]
            assert isinstance(first, Finished)
            return first
        return None

    def _await_peer_death(self, failed: dict[int, Failed]) -> None:
        """An error in a collective is often only the echo of a peer's death: give Ray time to say so."""
        assert self.current is not None
        seems_echo = all(_is_collective_error(outcome.error) for outcome in failed.values())
        deadline = time.monotonic() + (PEER_DEATH_S if seems_echo else 0.5)
        while not self.current.dead and time.monotonic() < deadline:
            self._watch(TICK_S)

    def _close(self) -> None:
        self.activity = "ended"
        for generation in self._generations():
            generation.kill()
        self.slots.close()
        with self._request_lock:
            if self._request is not None:
                self._request.done.set_exception(ResizeFailed("the run has ended"))


def _is_collective_error(error: Exception) -> bool:
    """Whether torch raised it because a peer's connection broke."""
    if type(error).__module__.startswith("torch"):
        return True
    words = str(error)
    return any(sign in words for sign in ("Connection closed by peer", "Connection reset", "gloo", "NCCL"))


__all__ = ["Controller", "RunEnded", "StateLost"]
