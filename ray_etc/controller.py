"""The run's own thread: it lets the policy decide about what it sees, and carries the decision out.

One thing after the other, in this one thread; while a step of a resize waits for Ray, `Watch` keeps watching. Other
threads only read, ask for a resize through `requests`, or ask a rank whether a configuration is possible.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.train import ScalingConfig

from ray_etc.actors.errors import HoldsMore, ResizeFailed, StateLost
from ray_etc.actors.generation import Generation, TrainJob
from ray_etc.actors.handover import Handover, start_generation
from ray_etc.actors.headroom import Headroom, find_headroom
from ray_etc.actors.outcomes import Failed, Finished
from ray_etc.actors.ray_internals import label_selector
from ray_etc.actors.record import ResizeRecord
from ray_etc.actors.slots import Slot, SlotPool
from ray_etc.actors.standby import IDLE_PATIENCE_S, Standbys
from ray_etc.choice import Chooser, largest
from ray_etc.first_choice import FirstChoice
from ray_etc.planners.layout import RankLayout, TensorSpec
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.placement import known_tensors, place
from ray_etc.planners.policy import Noop, Recover, Resize, Situation, decide
from ray_etc.planners.words import size
from ray_etc.reports import ReportBook
from ray_etc.requests import Aim, RequestBox
from ray_etc.watch import TICK_S, RunEnded, Stopped, Watch

logger = logging.getLogger(__name__)

SETTLE_S = 1.0
"""A node's slots come, and its ranks die, one by one: wait so long after the last and take them together."""
RETRY_GROWTH_S = 10.0
RETRY_DRAIN_S = 1.0
"""After a resize that failed, wait so long before the next that nobody asked for."""
MOST_RECOVERIES = 3
"""So often may one step be recovered to, and so often may a recovery fail, before the run ends."""
REFUSED_S = 10.0
"""How long a state's refusal of a configuration holds: one may be for a batch that is soon past."""
PEER_DEATH_S = 20.0
"""How long after an error in a collective Ray may need to notice that a peer is dead."""


class Controller:
    """Runs generations until one has trained to the end. `run` is the thread."""

    def __init__(
        self, job: TrainJob, chooser: Chooser, scaling: ScalingConfig, book: ReportBook, warm_standbys: bool
    ) -> None:
        self.job, self.scaling, self.book = job, scaling, book
        self.requests = RequestBox(Aim(scaling.max_workers, chooser))
        self.slots = SlotPool(job.resources, label_selector(scaling))
        self.watch = Watch(self.slots, lambda: self.requests.aim.number, Standbys(job, warm_standbys))
        self.records: list[ResizeRecord] = []
        self.activity = "starting"
        self._tensors: list[TensorSpec] = []
        self._unmeasured: ResizeRecord | None = None
        self._checked: dict[ParallelConfig, tuple[str | None, float]] = {}
        self._grow_not_before = self._drain_not_before = 0.0
        self._recoveries: Counter[int | None] = Counter()

    @property
    def current(self) -> Generation | None:
        return self.watch.current

    def held(self) -> dict[int, RankLayout]:
        """What each slot holds; empty until the first generation has built its model."""
        return self.current.layouts() if self.current is not None and self.current.entered else {}

    def run(self) -> Any:
        """Train to the end; returns what rank 0's loop returned, or raises why it could not."""
        try:
            current = self._start_first_generation()
            while True:
                self._tick()
                current = self.watch.current or current
                ended = self._ended(current)
                if ended is not None:
                    return ended.value
                match decide(self._situation(current), self._largest):
                    case Resize() as resize:
                        self._resize(current, resize)
                    case Recover() as recover:
                        self._recover(current, recover)
                    case Noop(why):
                        self.activity = f"training; {why}" if why else "training"
                        self._check_for_hopelessness(current, why)
        except Stopped:
            if self.current is not None and self.current.entered:
                self.book.poll(self.current, wait=True)
            return None
        finally:
            self.activity = "ended"
            self._measured()
            self.requests.close()
            self.watch.close()

    # Changing generations --------------------------------------------------------------------------------------------

    def _start_first_generation(self) -> Generation:
        """On all slots that there are, or on fewer where so many replicas cannot share the global batch."""
        self.activity = "waiting for slots"
        first = FirstChoice(self.job, self.scaling, self.requests.aim, self.slots)
        parallel = first.await_slots(self.watch, self._has_settled)
        while True:
            usable = self.slots.usable
            chosen = place([], {}, parallel, {slot.slot_id: slot.node_name for slot in usable}).slot_of_rank
            self.activity = f"starting {parallel}"
            generation = Generation.create(0, parallel, [self.slots[slot_id] for slot_id in chosen], self.job, {}, 0)
            self.watch.current = generation
            try:
                start_generation(generation, self.job, self.watch.wait)
                break
            except (RunEnded, ResizeFailed):
                fewer = first.with_fewer_replicas(generation)
                if fewer is None:
                    self._ended(generation)  # raises the user's own error where there is one
                    raise
                generation.kill()
                parallel = fewer
        held = max(sum(entered.allocations.nbytes) for entered in generation.entered)
        if held > (self.job.slot_nbytes or held):
            raise ValueError(
                f"a rank of {parallel} holds {size(held)} of state, more than slot_nbytes={self.job.slot_nbytes} "
                f"({size(self.job.slot_nbytes or 0)}); raise it, or spread the state over more ranks"
            )
        self._tensors = known_tensors(list(generation.layouts().values()))
        for rank in generation.ranks:
            rank.begin.remote(0)
        return generation

    def _resize(self, old: Generation, resize: Resize) -> None:
        record = ResizeRecord(old.number + 1, resize.reason, old.parallel, resize.parallel, resize.deadline)
        if record.is_requested:
            self.watch.is_withdrawn = lambda: self.requests.parallel != record.parallel_to
        try:
            new = self._change(old, resize.slots, record)
        except Exception as error:
            if resize.deadline is None:
                self._grow_not_before = time.monotonic() + RETRY_GROWTH_S
            else:
                self._drain_not_before = time.monotonic() + RETRY_DRAIN_S
            self.activity = "training"
            self._give_up(record, error)
            if isinstance(error, StateLost):
                raise error.__cause__ if isinstance(error.__cause__, Stopped) else error from None
        else:
            self._commit(old, new, record)
        finally:
            self.watch.is_withdrawn = lambda: False

    def _recover(self, old: Generation, recover: Recover) -> None:
        record = ResizeRecord(old.number + 1, recover.reason, old.parallel, recover.parallel)
        try:
            new = self._change(old, recover.slots, record)
        except Exception as error:
            # The survivors stay as they are, so it can be tried again, unless what is missing is lost for good.
            self._give_up(record, error)
            if not isinstance(error, RunEnded):
                self._recoveries[None] += 1
            if isinstance(error, StateLost | Stopped) or self._recoveries[None] >= MOST_RECOVERIES:
                raise
        else:
            self._commit(old, new, record)
            self._recoveries[record.next_step] += 1
            if self._recoveries[record.next_step] > MOST_RECOVERIES:
                raise RuntimeError(f"ranks died {MOST_RECOVERIES + 1} times in step {record.next_step}")

    def _change(self, old: Generation, slot_ids: Sequence[int], record: ResizeRecord) -> Generation:
        """Start the next generation in the shadow, its ranks where most of their state already is, and hand over.

        On any exception but StateLost the old generation is as it was.
        """
        self.records.append(record)
        self.book.before_resize(record)
        self.activity = f"preparing {record.parallel_to} ({record.reason})"
        logger.info("%d: %s -> %s, %s", record.generation, record.parallel_from, record.parallel_to, record.reason)
        nodes = {slot_id: self.slots[slot_id].node_name for slot_id in slot_ids if slot_id in self.slots}
        held = {old.slots[rank].slot_id: old.entered[rank].layout for rank in old.survivors()}
        chosen = place(self._tensors, held, record.parallel_to, nodes).slot_of_rank
        slots = [self.slots[slot_id] for slot_id in chosen]
        headroom = None
        if not old.dead:
            headroom = find_headroom(old, slots, self._tensors, self.job, self.watch.wait, record)
        expected_mode = record.memory_mode
        try:
            return self._attempt(old, slots, slot_ids, record, headroom)
        except HoldsMore as error:
            if headroom is None or not headroom.is_limited or expected_mode == "tight":
                raise
            logger.warning(
                "generation %d begins again, releasing the old state phase by phase: %s", record.generation, error
            )
            record.memory_mode = "tight"
            return self._attempt(old, slots, slot_ids, record, headroom)

    def _attempt(
        self,
        old: Generation,
        slots: Sequence[Slot],
        usable: Sequence[int],
        record: ResizeRecord,
        headroom: Headroom | None,
    ) -> Generation:
        standbys = self.watch.standbys.take(slots)
        about_step = self.book.latest_step + 1 if record.memory_mode == "safe" else None
        new = Generation.create(record.generation, record.parallel_to, slots, self.job, standbys, about_step)
        self.watch.preparing = new
        handover = Handover(old, new, usable, self.job, self.watch.wait, record, headroom)
        self.watch.must_finish = lambda: handover.is_past_return
        try:
            with record.phase("prepare"):
                start_generation(new, self.job, self.watch.wait, record.memory_mode == "tight")
            record.take_in_stages(each.stages for each in new.entered)
            handover.carry_out()
        except BaseException:
            handover.abort()
            self.watch.drop_preparing()
            raise
        finally:
            self.watch.must_finish = lambda: False
        return new

    def _commit(self, old: Generation, new: Generation, record: ResizeRecord) -> None:
        self._measured()
        self._unmeasured = record
        self.book.poll(old, wait=True)
        self.book.void_from(record.next_step)
        self.watch.replace_current(new)

    def _give_up(self, record: ResizeRecord, error: Exception) -> None:
        record.error = f"{type(error).__name__}: {error}"
        logger.warning("generation %d was given up: %s", record.generation, record.error)
        self.requests.answer(record)
        self.book.after_resize(record)

    def _measured(self) -> None:
        """The last resize's record is as complete as it will be."""
        record, self._unmeasured = self._unmeasured, None
        if record is not None:
            self.requests.answer(record)
            self.book.after_resize(record)

    # Watching and deciding -------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.watch.tick(TICK_S)
        if self.watch.stop_requested.is_set():
            raise Stopped
        if self.current is None:
            return
        progress = self.book.poll(self.current, wait=False)
        first_steps = [(p.first_step_started_at, p.first_step_s) for p in progress if p is not None]
        if len(first_steps) < len(progress) or any(None in each for each in first_steps):
            return
        self.current.has_stepped = True
        if self._unmeasured is None:
            return
        started_at = max(start for start, _ in first_steps if start is not None)
        self._unmeasured.pause_s = started_at - (self._unmeasured.paused_at or started_at)
        self._unmeasured.phases["first_step"] = max(duration for _, duration in first_steps if duration is not None)
        self._measured()

    def _has_settled(self) -> bool:
        return time.monotonic() - max(self.slots.last_change, self.watch.last_death) > SETTLE_S

    def _may_grow(self, current: Generation) -> bool:
        """Not before the standbys of new slots are warm, so that starting costs the training nothing, if that helps."""
        waited_s = time.monotonic() - self.slots.last_change
        is_ready = self.watch.standbys.are_warm(self.slots.usable) or waited_s > IDLE_PATIENCE_S
        return self._has_settled() and is_ready and time.monotonic() > self._grow_not_before and not current.dead

    def _warm(self, current: Generation) -> tuple[int, ...]:
        """Usable slots with a warm standby; none where one of a survivor's slots is not among them."""
        usable, warm = {slot.slot_id for slot in self.slots.usable}, self.watch.standbys.pids.keys()
        return tuple(sorted(usable & warm)) if current.living_slot_ids & usable <= warm else ()

    def _situation(self, current: Generation) -> Situation:
        may_move_away = time.monotonic() > self._drain_not_before
        deaths_settled = time.monotonic() - self.watch.last_death > SETTLE_S
        return Situation(
            parallel=current.parallel,
            usable=tuple(slot.slot_id for slot in self.slots.usable),
            draining={
                slot.slot_id: slot.deadline or time.time()
                for slot in self.slots.draining
                if slot.slot_id in current.slot_ids and may_move_away and not current.dead
            },
            dead_ranks=tuple(sorted(current.dead)) if deaths_settled else (),
            warm=self._warm(current) if current.dead else (),
            requested=self.requests.parallel if self._unmeasured is None and not current.dead else None,
            at_least=self.scaling.min_workers,
            at_most=self.requests.aim.number,
            is_settled=self._may_grow(current),
        )

    def check(self, parallel: ParallelConfig) -> str | None:
        """Why the state cannot live under `parallel`, or None. Asked of living ranks, seldom for each configuration."""
        problem, known_until = self._checked.get(parallel, (None, 0.0))
        if time.monotonic() > known_until:
            current = self.current
            if current is None or not current.entered:
                raise RuntimeError("the run has not built its model yet; wait for its first step")
            asked = [current.ranks[rank].check_parallel.remote(parallel) for rank in current.survivors()]
            answered, _ = ray.wait(asked, num_returns=1, timeout=self.job.timeout_s) if asked else ([], [])
            try:
                problem = ray.get(answered[0], timeout=0)
            except (IndexError, RayActorError, GetTimeoutError):
                return "no rank answers"  # and so it cannot be tried now; it is asked again later
            self._checked[parallel] = problem, math.inf if problem is None else time.monotonic() + REFUSED_S
        return problem

    def _largest(self, at_most: int) -> ParallelConfig | None:
        return largest(self.requests.aim.chooser, at_most, self.check)

    # Ending ----------------------------------------------------------------------------------------------------------

    def _ended(self, current: Generation) -> Finished | None:
        """What the generation came to; None while ranks still train, or where a peer's death explains an error."""
        failed = {rank: outcome for rank, outcome in current.outcomes.items() if isinstance(outcome, Failed)}
        if failed and not current.dead:
            self._await_peer_death(current, failed)
            if not current.dead:
                self.book.raise_failure(failed, current)
        first = current.outcomes.get(0)
        alive = current.survivors()
        if isinstance(first, Finished) and all(isinstance(current.outcomes.get(rank), Finished) for rank in alive):
            self._tick()
            self.book.poll(current, wait=True)
            return first
        return None

    def _await_peer_death(self, current: Generation, failed: dict[int, Failed]) -> None:
        """An error in a collective is often only the echo of a peer's death: give Ray time to say so."""
        seems_echo = all(_is_collective_error(outcome.error) for outcome in failed.values())
        deadline = time.monotonic() + (PEER_DEATH_S if seems_echo else 0.5)
        while not current.dead and time.monotonic() < deadline:
            self.watch.tick(TICK_S)

    def _check_for_hopelessness(self, current: Generation, why: str) -> None:
        """After a death nobody trains: do not wait for ever."""
        if not current.dead:
            return
        if not current.survivors():
            raise StateLost("every rank died, and with them the training state")
        if time.monotonic() - self.watch.last_death > self.job.start_timeout_s:
            raise StateLost(f"{why}, for {self.job.start_timeout_s:.0f} s: add nodes, or lower num_workers")


def _is_collective_error(error: Exception) -> bool:
    """Whether it is how torch and gloo say that a peer's connection broke."""
    signs = ("Connection closed by peer", "Connection reset", "Broken pipe", "gloo", "NCCL")
    return type(error).__name__.startswith("Dist") or any(sign in str(error) for sign in signs)
