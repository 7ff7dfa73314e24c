"""What waits for what on the streams of a GPU handover, for stages of any duration: on paper, so no GPU is needed.

A stage is what was enqueued between two events; it begins when what is before it on its stream, and all that its stream
was told to wait for, has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_etc.actors import pipeline
from ray_etc.actors.pipeline import BUFFERS, Pipeline
from ray_etc.actors.transports.base import Deadline


@dataclass
class Gpu:
    """What was enqueued, in order: (stream, stage, events to wait for, events that come after it)."""

    enqueued: list[tuple[Any, str, list[Any], list[Any]]] = field(default_factory=list)
    current: Any = None

    def add(self, stage: str, stream: Any = None, waits: Any = (), records: Any = ()) -> None:
        self.enqueued.append((stream or self.current, stage, list(waits), list(records)))

    def times(
        self, seconds: Callable[[str], float], queue_of: Callable[[Any], Any] | None = None
    ) -> dict[str, tuple[float, float]]:
        """When each stage begins and ends, where each takes so long.

        A queue hands out what is in it in order, so that whatever comes after a stage that cannot begin yet, or after
        an event that is yet to happen, waits for that, on any stream.
        """
        free: dict[Any, float] = {}
        issued: dict[Any, float] = {}
        happened: dict[int, float] = {}
        times = {}
        for stream, stage, waits, records in self.enqueued:
            assert all(id(event) in happened for event in waits), f"{stage} waits for what is not enqueued yet: no wait"
            queue = (queue_of or id)(stream)
            begin = max([free.get(id(stream), 0.0), issued.get(queue, 0.0), *(happened[id(event)] for event in waits)])
            end = begin + (seconds(stage) if stage else 0.0)
            free[id(stream)] = end
            happened |= {id(event): end for event in records}
            issued[queue] = end if waits or records else begin
            if stage:
                times[stage] = (begin, end)
        return times


class Stream:
    def __init__(self, gpu: Gpu, priority: int = 0) -> None:
        self._gpu, self.priority = gpu, priority

    def wait_event(self, event: Any) -> None:
        self._gpu.add("", self, waits=[event])

    def record_event(self) -> Any:
        event = Event(self._gpu)
        event.record(self)
        return event

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def record(self, stream: Stream | None = None) -> None:
        self._gpu.add("", stream, records=[self])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, gpu.current = gpu.current, stream
        yield
        gpu.current = before

    monkeypatch.setattr(pipeline.torch.cuda, "Stream", lambda _, priority=0: Stream(gpu, priority))
    monkeypatch.setattr(pipeline.torch.cuda, "Event", lambda **_: Event(gpu))
    monkeypatch.setattr(pipeline.torch.cuda, "stream", on)
    return gpu


def enqueue(gpu: Gpu, relays: list[bool]) -> None:
    """All of a handover in as many rounds, some of which pass on what earlier ones brought."""
    gpu.enqueued.clear()

    def stage(name: str) -> Any:
        return SimpleNamespace(run=lambda: gpu.add(name), join=lambda: gpu.add(f"{name}'s rest"))

    rounds = [
        SimpleNamespace(
            **{part: stage(f"{part} {index}") for part in ("pack", "unpack", "check")},
            **{"sends": index, "receives": index, "has_relays": has_relays},
        )
        for index, has_relays in enumerate(relays)
    ]
    work: Any = SimpleNamespace(rounds=rounds, local=stage("local"), local_arrived=stage("local arrived"))
    transport: Any = SimpleNamespace(post=lambda sends, receives, deadline: gpu.add(f"wire {sends}"))
    made = Pipeline(work, transport, torch.device("cpu"))
    made._enqueue(Deadline(10.0), lambda event: None)
    gpu.add("the end", Stream(gpu, 1), waits=[made._certified])
    gpu.add("what is moved", Stream(gpu, 2), waits=[made._local, made._moved])


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.randoms(use_true_random=False))
def test_stages_wait_for_each_other_however_long_each_takes(gpu: Gpu, relays: list[bool], random: Any) -> None:
    enqueue(gpu, relays)
    times = gpu.times(lambda stage: random.choice([0.0, 0.1, 1.0, 10.0]))

    def follows(later: str, earlier: str) -> None:
        assert times[later][0] >= times[earlier][1], f"{later} does not wait for {earlier}"

    for index, has_relays in enumerate(relays):
        follows(f"wire {index}", f"pack {index}")
        follows(f"unpack {index}", f"wire {index}")
        follows(f"check {index}", f"unpack {index}")
        for earlier in range(index if has_relays else 0):
            follows(f"pack {index}", f"unpack {earlier}")
        if index >= BUFFERS:
            follows(f"pack {index}", f"wire {index - BUFFERS}")
            follows(f"wire {index}", f"unpack {index - BUFFERS}")
        follows("what is moved", f"unpack {index}")
    follows("local's rest", f"unpack {len(relays) - 1}")
    for last in ("local", "local's rest"):
        follows("what is moved", last)
    for stage in times.keys() - {"the end", "what is moved"}:
        follows("the end", stage)


def test_next_round_is_packed_and_the_last_unpacked_while_one_is_on_the_wire(gpu: Gpu) -> None:
    enqueue(gpu, [False] * 12)
    times = gpu.times(lambda stage: {"local": 9.0}.get(stage, 0.9 if "pack" in stage else 1.0))
    assert times["wire 0"][0] == times["local"][0] + 0.9
    for index in range(1, 12):
        assert times[f"wire {index}"][0] == pytest.approx(times[f"wire {index - 1}"][1])
        assert times[f"pack {index}"][0] < times[f"wire {index - 1}"][1]
        assert times[f"unpack {index - 1}"][0] < times[f"wire {index}"][1]


def test_messages_follow_each_other_at_once_where_all_streams_share_one_queue(gpu: Gpu) -> None:
    enqueue(gpu, [False] * 12)
    durations = {"local": 50.0, "local's": 1.0, "wire": 1.0, "pack": 0.9, "unpack": 0.9, "check": 0.9}
    times = gpu.times(lambda stage: durations.get(stage.split()[0], 0.0), lambda stream: None)
    for index in range(1, 12):
        assert times[f"wire {index}"][0] == pytest.approx(times[f"wire {index - 1}"][1])


def test_no_message_waits_for_the_local_copies_where_all_streams_share_one_queue(gpu: Gpu) -> None:
    enqueue(gpu, [False] * 12)
    times = gpu.times(lambda stage: 100.0 if stage == "local" else 1.0, lambda stream: None)
    assert times["wire 11"][1] < times["local"][1]
