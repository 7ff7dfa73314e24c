"""The meeting of a train loop with control calls, without Ray: freezing, breaking out, giving up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ray_etc.actors.context import Context
from ray_etc.actors.session import Session
from ray_etc.actors.state import StateShard, TrainState
from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import TensorSpec
from ray_etc.planners.parallel import ParallelConfig

CONTEXT = Context("test", 0, ParallelConfig(), 0, 0, 1, 0, 0)


def state_of(weight: torch.Tensor, *optimizers: torch.optim.Optimizer) -> TrainState:
    spec = TensorSpec("param", "weight", tuple(weight.shape), "float32", 4)
    return TrainState([StateShard(spec, Box.whole(tuple(weight.shape)), weight.data)], optimizers=optimizers)


class Loop:
    """A train loop in a thread of its own, whose steps the test lets go one by one."""

    def __init__(self, state: TrainState, body: Callable[[int], None], total: int = 100) -> None:
        self.session = Session(CONTEXT)
        self.go = threading.Semaphore(0)
        self.in_step = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, args=(state, body, total), daemon=True)
        self.thread.start()
        assert self.session.wait_entered(5.0)
        self.session.begin(0)

    def _run(self, state: TrainState, body: Callable[[int], None], total: int) -> None:
        for step in self.session.steps(state, total):
            self.in_step.release()
            self.go.acquire()
            body(step)

    def step(self) -> None:
        """Let the step that the loop is in end, and wait until it is in the next one."""
        self.go.release()
        assert self.in_step.acquire(timeout=5.0)


def start(state: TrainState, body: Callable[[int], None], **more: Any) -> Loop:
    loop = Loop(state, body, **more)
    assert loop.in_step.acquire(timeout=5.0)
    return loop


def sgd(weight: torch.nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD([weight], lr=1.0)


def test_frozen_rank_begins_no_update() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = sgd(weight)

    def body(step: int) -> None:
        weight.grad = torch.ones(4)
        optimizer.step()

    loop = start(state_of(weight, optimizer), body)
    loop.step()
    assert loop.session.freeze(5.0).next_step == 1
    loop.go.release()
    loop.thread.join(0.3)
    assert loop.thread.is_alive()
    assert weight.tolist() == [-1.0] * 4


def test_first_generation_begins_where_its_checkpoint_ended() -> None:
    state = state_of(torch.zeros(1))
    state.next_step = 7
    loop = start(state, lambda step: loop.session.report({"step": step}, "a checkpoint"))
    assert loop.session.next_step() == 7
    loop.step()
    [report] = loop.session.progress().reports
    assert (report.step, report.metrics, report.checkpoint) == (7, {"step": 7}, "a checkpoint")


def test_freeze_lets_a_chained_update_end() -> None:
    """Two optimizers make one update; frozen between them, the tensors would belong to no step."""
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    one, two = sgd(first), sgd(second)
    between, go_on = threading.Event(), threading.Event()

    def body(step: int) -> None:
        first.grad, second.grad = torch.ones(2), torch.ones(2)
        one.step()
        between.set()
        go_on.wait(5.0)
        two.step()

    loop = start(state_of(first, one, two), body)
    loop.go.release()
    assert between.wait(5.0)
    frozen: list[Any] = []
    freezing = threading.Thread(target=lambda: frozen.append(loop.session.freeze(5.0)))
    freezing.start()
    go_on.set()
    freezing.join(5.0)
    assert frozen[0].next_step == 1
    assert first.tolist() == second.tolist() == [-1.0] * 2


def test_freeze_of_a_half_done_update_fails() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    half_way = threading.Event()

    def body(step: int) -> None:
        weight.data[0] = 1.0
        half_way.set()
        threading.Event().wait(2.0)

    loop = start(state_of(weight), body)  # without optimizers nobody knows when the update begins
    loop.go.release()
    assert half_way.wait(5.0)
    with pytest.raises(TimeoutError, match="rank 0 is half-way through the update of step 0"):
        loop.session.freeze(0.3)


def test_no_last_step_is_agreed_on_after_a_break() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    session = Session(CONTEXT)

    def loop() -> None:
        for _ in session.steps(state_of(weight, sgd(weight)), 100):
            break
        threading.Event().wait(2.0)  # the user's own work after the loop

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    assert session.wait_entered(5.0)
    session.begin(0)
    deadline = threading.Event()
    while session.current_step is None:
        deadline.wait(0.01)
    deadline.wait(0.1)
    assert not session.propose_last_step(5)


def test_last_step_too_late_or_at_the_end_is_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    loop = start(state_of(weight, sgd(weight)), lambda step: None, total=10)
    loop.step()
    loop.step()
    assert not loop.session.propose_last_step(1)
    assert not loop.session.propose_last_step(9)
    assert loop.session.propose_last_step(3)


def test_loop_can_know_that_others_wait_for_its_last_step_until_the_resize_is_given_up() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    session = start(state_of(weight, sgd(weight)), lambda step: None).session
    assert not session.is_to_pause
    assert session.propose_last_step(50)
    assert session.is_to_pause
    session.resume()
    assert not session.is_to_pause


def test_giving_up_wakes_whoever_waits_for_the_last_step() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    loop = start(state_of(weight, sgd(weight)), lambda step: None)
    assert loop.session.propose_last_step(50)
    threading.Timer(0.1, loop.session.resume).start()
    with pytest.raises(RuntimeError, match="given up"):
        loop.session.wait_paused(30.0)


def test_small_state_is_a_snapshot() -> None:
    """What a state dict refers to may change in the next step; the boundary must not."""
    weight = torch.nn.Parameter(torch.zeros(2))
    live = {"n": torch.zeros(1)}

    class Item:
        def state_dict(self) -> dict[str, Any]:
            return live

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise AssertionError

    state = state_of(weight, sgd(weight))
    state.replicated["item"] = Item()

    def body(step: int) -> None:
        live["n"].add_(1)
        state.optimizers[0].step()

    loop = start(state, body)
    loop.step()
    boundary = loop.session.freeze(5.0)
    live["n"].add_(100)
    again = loop.session.freeze(5.0)
    assert boundary.digests == again.digests
    assert boundary.next_step == 1


def test_a_step_that_only_gathers_gradients_is_no_place_to_stop() -> None:
    """Else what it has gathered would be lost: the tensors are those of the update before, so its step is, too."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = sgd(weight)
    state = state_of(weight, optimizer)

    def body(step: int) -> None:
        weight.grad = torch.ones(2) if weight.grad is None else weight.grad + 1
        if step == 1 or step == 5:
            optimizer.step()
            weight.grad = None

    loop = start(state, body)
    for _ in range(5):
        loop.step()
    assert loop.session.next_step() == 5
    assert loop.session.freeze(5.0).next_step == 2
    assert weight.tolist() == [-2.0, -2.0]


@pytest.mark.parametrize(("tries", "updates", "is_whole"), [(0, 0, False), (0, 1, True), (1, 1, True), (1, 0, True)])
def test_pause_says_whether_the_step_made_or_skipped_an_update(tries: int, updates: int, is_whole: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = sgd(weight)
    state = state_of(weight, optimizer)
    tried = 5  # before the loop, such as a rehearsal
    state.updates_tried = lambda: tried

    def body(step: int) -> None:
        nonlocal tried
        tried += tries
        for _ in range(updates):
            optimizer.step()

    loop = start(state, body)
    assert loop.session.propose_last_step(0)
    loop.go.release()
    assert loop.session.wait_paused(5.0).is_whole == is_whole


class LateDevice:
    """Stands in for a GPU: what a step enqueues happens only when someone waits for the device, and it is let go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue: list[Callable[[], Any]] = []
        self.is_waited_for, self.goes_on = threading.Event(), threading.Event()
        device = self

        class Event:
            def record(self) -> None:
                self.position = len(device.queue)

            def query(self) -> bool:
                return not device.queue[: self.position]

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", self._synchronize)

    def _synchronize(self) -> None:
        if self.queue:
            self.is_waited_for.set()
            assert self.goes_on.wait(5.0)
            while self.queue:
                self.queue.pop(0)()


def test_pause_is_told_only_when_the_device_has_done_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others: a copy on a side stream raced the optimizer: stale weights. On a GPU: tests/gpu/test_boundary.py."""
    device, weight = LateDevice(monkeypatch), torch.nn.Parameter(torch.zeros(2))
    loop = start(state_of(weight), lambda step: device.queue.append(lambda: weight.data.fill_(step + 1.0)))
    assert loop.session.propose_last_step(0)
    loop.go.release()
    assert device.is_waited_for.wait(5.0)
    with pytest.raises(TimeoutError, match="was not reached"):
        loop.session.wait_paused(0.1)
    device.goes_on.set()
    assert loop.session.wait_paused(5.0).next_step == 1
    assert weight.tolist() == [1.0, 1.0]
