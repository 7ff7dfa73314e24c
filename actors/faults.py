"""Faults scripted by event, for tests: a process that dies, an error, or a flipped bit, at a named stage of a move."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class Fault:
    """What shall happen at an event of `Mover.run`. "corrupt" flips one bit of element 0 of target view `shard`."""

    event: str
    action: Literal["kill", "raise", "corrupt"]
    shard: int = 0


class FaultInjector:
    """Pass it as `on_event`; without faults it does nothing."""

    def __init__(self, faults: Sequence[Fault] = (), target_views: Sequence[torch.Tensor] = ()) -> None:
        self._faults = tuple(faults)
        self._target_views = target_views

    def __call__(self, event: str) -> None:
        for fault in self._faults:
            if fault.event != event:
                continue
            if fault.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.action == "raise":
                raise RuntimeError(f"injected fault at {event}")
            element = self._target_views[fault.shard].detach()[(slice(0, 1),) * self._target_views[fault.shard].dim()]
            element.view(torch.uint8).bitwise_xor_(1)
