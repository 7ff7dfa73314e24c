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
        self._pack, self._unpack, self._side, self._check = (torch.cuda.Stream(device) for _ in range(4))
        # NCCL's kernels come first when processors are free: everything else waits for them in the end.
        self._wire = torch.cuda.Stream(device, priority=-1)
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
        """An event is told when its stage is enqueued, on the stage's stream: what it enqueues comes right after.

        The order also suits a GPU on which all streams share one queue, as where a rank of Megatron's under tensor
        parallelism has only that (CUDA_DEVICE_MAX_CONNECTIONS=1). What comes after an event there waits for it, on any
        stream, so nothing that could run now may come after an event that is yet to happen.
        """
        rounds = self._work.rounds
        carried: list[torch.cuda.Event] = []
        unpacked: list[torch.cuda.Event] = []

        def pack(index: int) -> None:
            with torch.cuda.stream(self._pack):
                if index >= BUFFERS:
                    self._pack.wait_event(carried[index - BUFFERS])
                if rounds[index].has_relays:
                    self._pack.wait_stream(self._unpack)  # of all earlier rounds
                rounds[index].pack.run()
                on_event(f"round:{index}:packed")

        def check(index: int) -> None:
            unpacked.append(self._unpack.record_event())  # not before the next round is on its way; see above
            with torch.cuda.stream(self._check):
                self._check.wait_event(unpacked[index])
                rounds[index].check.run()

        if rounds:
            pack(0)
        with torch.cuda.stream(self._side):
            self._work.local.run()
            on_event("local:done")
        for index, each in enumerate(rounds):
            with torch.cuda.stream(self._wire):
                self._wire.wait_stream(self._pack)
                if index >= BUFFERS:
                    self._wire.wait_event(unpacked[index - BUFFERS])
                assert self._transport is not None
                self._transport.post(each.sends, each.receives, deadline)
                on_event(f"round:{index}:received")
            following = rounds[index + 1] if index + 1 < len(rounds) else None
            if following and not following.has_relays:
                pack(index + 1)
            if index:
                check(index - 1)
            carried.append(self._wire.record_event())
            with torch.cuda.stream(self._unpack):
                self._unpack.wait_event(carried[index])
                each.unpack.run()
                on_event(f"round:{index}:unpacked")
            if following and following.has_relays:
                pack(index + 1)
        if rounds:
            check(len(rounds) - 1)
        with torch.cuda.stream(self._side):
            self._local.record()  # nor this before all rounds are
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
