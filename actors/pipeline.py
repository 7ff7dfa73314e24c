"""The work of a handover on a GPU: every stage enqueued at once, on streams that wait for each other by events.

While round k is on the wire, round k+1 is packed and round k-1 unpacked; local copies and the checksums of what arrived
run beside. The host enqueues faster than the wire carries, so it only waits at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ray_etc.actors.transports.base import Deadline
from ray_etc.actors.transports.nccl import NcclTransport
from ray_etc.actors.work import Work

BUFFERS = 3
"""Staging buffers each way: one being packed or unpacked, one on the wire, one to spare."""


@dataclass(frozen=True, slots=True)
class Times:
    """See `MoveReport`."""

    local_s: float
    wire_s: float
    certify_s: float


class Pipeline:
    """Streams and events, made before the pause.

    Args:
        work: on GPU memory.
        transport: None where the work has no messages.
    """

    def __init__(self, work: Work, transport: NcclTransport | None, device: torch.device) -> None:
        self._work, self._transport = work, transport
        # NCCL's kernels come first when processors are free: everything else waits for them in the end. The other
        # priorities, of which torch has four, keep streams from sharing a queue to the GPU, in which what comes after
        # an event waits for it: ranks under tensor parallelism have one (CUDA_DEVICE_MAX_CONNECTIONS=1). The last two
        # may share one: then only when the local copies are known to be there is late.
        self._wire, self._pack, self._unpack, self._check, self._side = (
            torch.cuda.Stream(device, priority=priority) for priority in (-3, -2, -1, 0, 0)
        )
        self._start, self._local, self._carried, self._moved, self._certified = (
            torch.cuda.Event(enable_timing=True) for _ in range(5)
        )

    def run(self, deadline: Deadline, on_event: Callable[[str], None]) -> Times:
        """Do all of it, after what is on the current stream; see `Mover.run`."""
        streams = [self._pack, self._wire, self._unpack, self._side, self._check]
        guard: AbstractContextManager[None] = nullcontext()
        if self._transport is not None:
            guard = self._transport.guarded(deadline, streams)
        with guard:
            self._work.sums.zero_()
            self._start.record()
            for stream in streams:
                stream.wait_event(self._start)
            self._enqueue(deadline, on_event)
            for event in (self._local, self._moved):
                self._wait(event, deadline)
            on_event("moved")
            self._wait(self._certified, deadline)
        local_s, wire_s, moved_s, all_s = (
            self._start.elapsed_time(event) / 1e3
            for event in (self._local, self._carried, self._moved, self._certified)
        )
        if local_s > wire_s:  # the rest of the local copies had the whole GPU
            local_s = max(local_s, moved_s)
        return Times(local_s, wire_s, max(all_s - max(local_s, wire_s), 0.0))

    def _wait(self, event: torch.cuda.Event, deadline: Deadline) -> None:
        if self._transport is not None:
            self._transport.wait(event, deadline)
        event.synchronize()

    def _enqueue(self, deadline: Deadline, on_event: Callable[[str], None]) -> None:
        """An event is told when its stage is enqueued, on the stage's stream: what it enqueues comes right after."""
        rounds = self._work.rounds
        unpacked: list[torch.cuda.Event] = []
        carried: list[torch.cuda.Event] = []
        if rounds:
            self._pack_round(0, carried, unpacked, on_event)
        with torch.cuda.stream(self._side):
            self._work.local.run()
            on_event("local:done")
        for index, each in enumerate(rounds):
            if index:
                self._pack_round(index, carried, unpacked, on_event)
            with torch.cuda.stream(self._wire):
                self._wire.wait_stream(self._pack)
                if index >= BUFFERS:
                    self._wire.wait_event(unpacked[index - BUFFERS])
                assert self._transport is not None
                self._transport.post(each.sends, each.receives, deadline)
                on_event(f"round:{index}:received")
                carried.append(self._wire.record_event())
            with torch.cuda.stream(self._unpack):
                self._unpack.wait_event(carried[index])
                each.unpack.run()
                on_event(f"round:{index}:unpacked")
                unpacked.append(self._unpack.record_event())
            with torch.cuda.stream(self._check):
                self._check.wait_event(unpacked[index])
                each.direct.run()
                each.arrived.run()
        with torch.cuda.stream(self._side):
            # Not before: in a queue that streams share, all that comes after it would wait for the local copies.
            self._local.record()
            self._work.local_arrived.run()
        with torch.cuda.stream(self._unpack):
            self._carried.record()
            if rounds:
                self._work.local.join()
            self._moved.record()
        with torch.cuda.stream(self._check):
            for stream in (self._pack, self._unpack, self._side):
                self._check.wait_stream(stream)
            self._certified.record()

    def _pack_round(
        self,
        index: int,
        carried: list[torch.cuda.Event],
        unpacked: list[torch.cuda.Event],
        on_event: Callable[[str], None],
    ) -> None:
        with torch.cuda.stream(self._pack):
            if index >= BUFFERS:
                self._pack.wait_event(carried[index - BUFFERS])
            if index and self._work.rounds[index].has_relays:
                self._pack.wait_event(unpacked[-1])  # of all earlier rounds: they are unpacked in order
            self._work.rounds[index].pack.run()
            on_event(f"round:{index}:packed")
