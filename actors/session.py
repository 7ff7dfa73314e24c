"""Inside a rank: where the user's train loop meets the control calls of the run.

The train loop runs in one thread. It stops only inside `steps()`, where it enters the loop and between two steps, and,
once frozen, before an optimizer's update. Control calls come in on other threads at any time, also while the loop is
stuck in a collective.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ray_etc.actors.context import Context
from ray_etc.actors.messages import Boundary, Load, Progress, Report
from ray_etc.actors.small_state import SmallState, load_small_state
from ray_etc.actors.state import TrainState


class GenerationReplaced(BaseException):
    """Unwinds the user's train loop in a generation whose state the next one has taken over."""


@dataclass(frozen=True)
class Mark:
    """A boundary with what tells whether the GPU has got there, since the host runs ahead of it.

    `update_began` stands before the optimizer's update that led here, `update_ended` after it; None on CPUs.
    """

    boundary: Boundary
    update_began: torch.cuda.Event | None
    update_ended: torch.cuda.Event | None


def _has_happened(event: torch.cuda.Event | None) -> bool:
    return event is None or event.query()


def _gpu_event() -> torch.cuda.Event | None:
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event()
    event.record()
    return event


class Session:
    """One rank's train loop as a small state machine. What both sides change is guarded by `self._changed`."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.state: TrainState | None = None
        self.total_steps = 0
        self.on_move_event: Callable[[str], None] = lambda event: None
        """Told of each stage of a resize that this rank takes part in: "connect" and "prepare" where that begins, then
        those of `Mover.run`. Tests script faults with it."""
        self.on_enter: Callable[[], None] = lambda: None
        """Called on the train thread once the model is built."""
        self.nbytes_between_steps: int | None = None
        """What torch's allocator has given out after a step, on a GPU: after the first, and whenever it is trimmed."""
        self.stages: dict[str, float] = {"import": time.time()}
        """When each stage of this rank's start began, in Unix time; it is "entered" where it awaits its first step."""
        self._changed = threading.Condition()
        self._load: Load | None = None
        self._first_step: int | None = None
        self._last_step: int | None = None
        self._is_paused = False
        self._is_replaced = False
        self._is_frozen = False
        self._is_over = False
        self._is_updating = False
        self._updates_tried = 0
        self._trims_left = 0
        self._marks: deque[Mark] = deque(maxlen=3)
        self._update_began: torch.cuda.Event | None = None
        self._reports: list[Report] = []
        self._current_step: int | None = None
        self._first_started_at: float | None = None
        self._first_step_s: float | None = None

    # The train thread ------------------------------------------------------------------------------------------------

    def steps(self, state: TrainState, total: int) -> Iterator[int]:
        """See `ray_etc.steps`."""
        first = self._enter(state, total)
        try:
            for step in range(first, total):
                self._current_step = step
                if self._first_started_at is None:
                    self._first_started_at = time.time()
                if not state.optimizers:
                    self._before_update()  # nothing tells when the update begins: take the whole step for it
                yield step
                if self._first_step_s is None:
                    self._first_step_s = time.time() - self._first_started_at
                self._boundary(step)
        finally:
            self.end()  # also where the user breaks out of the loop

    def report(self, metrics: dict[str, Any], checkpoint: Any = None) -> None:
        if self._current_step is None:
            raise RuntimeError("ray_etc.report() was called outside of `for step in ray_etc.steps(...)`")
        with self._changed:
            self._reports.append(Report(self._current_step, dict(metrics), checkpoint))

    @property
    def current_step(self) -> int | None:
        """The step that the user's loop is in, for error messages."""
        return self._current_step

    @property
    def is_to_pause(self) -> bool:
        """Whether a last step was agreed on, which others wait for."""
        return self._last_step is not None

    def end(self) -> None:
        """The loop is over, by its end or by an exception: from now on no last step can be agreed on."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def begin_stage(self, stage: str) -> None:
        """What comes now of a rank's start; see `stages`."""
        self.stages[stage] = time.time()

    def _enter(self, state: TrainState, total: int) -> int:
        if not isinstance(state, TrainState):
            raise TypeError(
                f"ray_etc.steps() needs the TrainState that says what to move, got {type(state).__name__}; "
                "make one with ray_etc.megatron.build(...).state or ray_etc.megatron.state(model, optimizer, ...)"
            )
        if self.state is not None:
            raise RuntimeError("ray_etc.steps() was entered twice; a train loop has one")
        state.check_memory()
        self.on_enter()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what the model was built with, before another stream writes over it
        for optimizer in state.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._before_update())
        self.begin_stage("entered")
        with self._changed:
            self.state, self.total_steps = state, total
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._first_step is not None or self._load is not None)
        if self._load is not None:
            load = self._load
            load_small_state(state, load.replicated, load.streams, self.context.coordinate, load.next_step)
            with self._changed:
                self._load = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._first_step is not None)
        first = self._first_step or state.next_step
        self._updates_tried = state.updates_tried()
        self._record_boundary(first, is_whole=True)
        return first

    def _before_update(self) -> None:
        with self._changed:
            # A frozen rank's tensors are being read: it must never begin an update. Its process is ended later.
            # An update that has begun goes on, though: a chained optimizer comes here once for each of its parts.
            self._changed.wait_for(lambda: not self._is_frozen or self._is_updating)
            if not self._is_updating:
                self._update_began = _gpu_event()
            self._is_updating = True

    def _record_boundary(self, next_step: int, *, is_whole: bool) -> None:
        assert self.state is not None
        if is_whole:
            self._before_update()  # where the update was skipped, too: `hold` writes
            self.state.hold()
        boundary = Boundary(next_step, SmallState.of(self.state), time.time(), is_whole=is_whole)
        update_ended = _gpu_event()
        with self._changed:
            if self._marks and not self._marks[-1].boundary.is_whole:
                self._marks.pop()  # it must not push out the last whole one
            self._marks.append(Mark(boundary, self._update_began, update_ended))
            self._is_updating = False
            self._changed.notify_all()

    def _boundary(self, step: int) -> None:
        assert self.state is not None
        tried_before, self._updates_tried = self._updates_tried, self.state.updates_tried()
        self._record_boundary(step + 1, is_whole=self._is_updating or self._updates_tried > tried_before)
        if torch.cuda.is_available() and (self._trims_left or self.nbytes_between_steps is None):
            self.nbytes_between_steps = torch.cuda.memory_allocated()
        if self._trims_left:
            self._trim()
        if self._last_step is None or step < self._last_step:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        with self._changed:
            if self._last_step is None or step < self._last_step:
                return  # withdrawn meanwhile
            self._is_paused = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_replaced or not self._is_paused)
            if self._is_replaced:
                raise GenerationReplaced

    def _trim(self) -> None:
        """At the first boundary give cached memory back; at the next, what a step needs has been taken again."""
        if self._trims_left == 2:
            gc.collect()  # the traceback of what failed may hold buffers
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        with self._changed:
            self._trims_left -= 1
            self._changed.notify_all()

    # Control threads -------------------------------------------------------------------------------------------------

    def wait_entered(self, timeout_s: float) -> bool:
        """Whether the train loop has handed over its state; False once it is over without, or after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self.state is not None or self._is_over, timeout_s)
            return self.state is not None

    def load(self, load: Load, timeout_s: float) -> None:
        """Have the train thread take over the old generation's small state; its tensors are already there."""
        with self._changed:
            self._load = load
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._load is None or self._is_over, timeout_s):
                raise TimeoutError(f"the small state was not loaded within {timeout_s:.0f} s")
            if self._is_over:
                raise RuntimeError("the train loop ended while it was loading the small state")

    def begin(self, first_step: int) -> None:
        with self._changed:
            self._first_step = first_step
            self._changed.notify_all()

    def next_step(self) -> int:
        with self._changed:
            return self._marks[-1].boundary.next_step if self._marks else 0

    def trim(self, timeout_s: float) -> None:
        """Have the train loop give back what torch's allocator keeps beyond the needs of a step; waits for that."""
        self.give_memory_back()
        with self._changed:
            self._changed.wait_for(lambda: not self._trims_left or self._is_over, timeout_s)

    def progress(self) -> Progress:
        """How the first step went; hands out each report once."""
        with self._changed:
            reports, self._reports = self._reports, []
            return Progress(self._first_started_at, self._first_step_s, reports)

    def propose_last_step(self, step: int) -> bool:
        """Agree to pause after `step`. False where that is too late, or would leave nothing to train.

        Where the loop is paused already, it goes on to there.
        """
        with self._changed:
            if (
                self._is_over
                or not self._marks
                or self._marks[-1].boundary.next_step > step
                or step >= self.total_steps - 1
            ):
                return False
            self._last_step, self._is_paused = step, False
            self._changed.notify_all()
            return True

    def wait_paused(self, timeout_s: float) -> Boundary:
        with self._changed:
            self._changed.wait_for(lambda: self._is_paused or self._is_over or self._last_step is None, timeout_s)
            if not self._is_paused:
                if self._is_over or self._last_step is None:
                    raise RuntimeError("the train loop ended, or the resize was given up, before the last step")
                raise TimeoutError(
                    f"the step boundary after step {self._last_step} was not reached within {timeout_s:.0f} s"
                )
            boundary = self._marks[-1].boundary
        return replace(boundary, digests=boundary.small_state.digests())

    def resume(self) -> None:
        """No resize after all: go on with the next step."""
        with self._changed:
            self._last_step, self._is_paused = None, False
            self._changed.notify_all()

    def give_memory_back(self) -> None:
        """Have the train thread return cached GPU memory after its step: that waits for the GPU, so no other may."""
        self._trims_left = 2

    def replace(self) -> None:
        """The next generation has everything: leave the train loop."""
        with self._changed:
            self._is_replaced = True
            self._changed.notify_all()

    def freeze(self, timeout_s: float) -> Boundary:
        """Stop for good before the next optimizer update, and say which step the tensors belong to.

        Works while the train thread is stuck in a collective of a peer that died.

        Raises:
            TimeoutError: an update has begun and does not end: the tensors belong to no step.
        """
        with self._changed:
            self._is_frozen = True
        deadline = time.monotonic() + timeout_s
        while (boundary := self._whole_boundary()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {self.context.world_rank} is half-way through the update of step {self._current_step}"
                )
            time.sleep(0.01)
        return replace(boundary, digests=boundary.small_state.digests())

    def _whole_boundary(self) -> Boundary | None:
        """The last boundary whose step the tensors hold now, or None while they change."""
        with self._changed:
            marks, is_updating, update_began = list(self._marks), self._is_updating, self._update_began
        if is_updating and _has_happened(update_began):
            return None
        for mark in reversed(marks):
            if not mark.boundary.is_whole:
                continue  # the tensors are still those of the one before
            if _has_happened(mark.update_ended):
                return mark.boundary
            if _has_happened(mark.update_began):
                return None
        return None


_session: Session | None = None


def open_session(context: Context) -> Session:
    global _session
    _session = Session(context)
    return _session


def is_first_generation() -> bool:
    """Whether this process makes the training state anew, instead of taking over another generation's."""
    return _session is None or _session.context.generation == 0


def about_step() -> int | None:
    """See `Context`."""
    return _session.context.about_step if _session is not None else 0


def current_session() -> Session:
    if _session is None:
        raise RuntimeError("this works only inside a train loop that ElasticTrainer runs")
    return _session


def begin_stage(stage: str) -> None:
    """See `Session.stages`; nothing outside of a rank."""
    if _session is not None:
        _session.begin_stage(stage)
