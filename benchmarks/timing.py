"""How long something takes on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU is done when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def least_s(action: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The least seconds of several; the first, which loads modules, does not count."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        action()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])
