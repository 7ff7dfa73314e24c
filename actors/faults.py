"""Faults scripted by event, for tests: what may happen to a process in the middle of a resize, at a named stage."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ray_etc.actors.transports.base import Transport

STALL_S = 60.0
"""Longer than any handover of a test may take."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What shall happen at an event (see `Session.on_move_event`).

    "kill": the process dies at once. "raise": an error. "stall": the thread stands still. "abort": every group of this
    process is aborted from a second thread. "exhaust": more memory is asked for than there is. "limit": from now on the
    process gets no more GPU memory than it has. "corrupt": one bit of element 0 of target view `shard` is flipped.
    """

    event: str
    action: Literal["kill", "raise", "stall", "abort", "exhaust", "limit", "corrupt"]
    shard: int = 0


class FaultInjector:
    """Pass it as `on_event`; without faults it does nothing."""

    def __init__(self, faults: Sequence[Fault] = (), target_views: Sequence[torch.Tensor] = ()) -> None:
        self._faults = tuple(faults)
        self._target_views = target_views

    def __call__(self, event: str) -> None:
        for fault in self._faults:
            if fault.event == event:
                self._act(fault)

    def _act(self, fault: Fault) -> None:
        match fault.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise RuntimeError(f"injected fault at {fault.event}")
            case "stall":
                threading.Event().wait(STALL_S)
            case "abort":
                for group in [each for each in gc.get_objects() if issubclass(type(each), Transport)]:
                    thread = threading.Thread(target=group.abort)
                    thread.start()
                    thread.join()
            case "exhaust":
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")
            case "limit":
                torch.cuda.empty_cache()
                share = torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory
                torch.cuda.set_per_process_memory_fraction(share)
            case "corrupt":
                view = self._target_views[fault.shard].detach()
                view[(slice(0, 1),) * view.dim()].view(torch.uint8).bitwise_xor_(1)
