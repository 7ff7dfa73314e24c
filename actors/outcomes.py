"""How a rank's train loop ended."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

import torch
from ray import cloudpickle

from ray_etc.actors.errors import HoldsMore, ResizeFailed
from ray_etc.planners.parallel import ParallelConfig


@dataclass(frozen=True)
class Finished:
    """The user's loop returned."""

    value: Any


@dataclass(frozen=True)
class Failed:
    """The user's loop raised: the error itself, its traceback from the user's function on, and the step."""

    error: Exception
    traceback: str
    step: int | None

    @classmethod
    def of(cls, error: Exception, step: int | None, caller: str) -> Failed:
        """`caller` is the file that called the user's function: its frames come first and are left out."""
        frames = traceback.extract_tb(error.__traceback__)
        while frames and frames[0].filename == caller:
            del frames[0]
        lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
        return cls(_picklable(error), "".join(lines), step)


@dataclass(frozen=True)
class Replaced:
    """The user's loop was left because the next generation took over."""


Outcome = Finished | Failed | Replaced


def not_built(rank: int, parallel: ParallelConfig, outcome: Outcome) -> ResizeFailed:
    """That a train loop ended before its first step, with the user's own traceback where it raised."""
    why = outcome.traceback.strip() if isinstance(outcome, Failed) else "its train loop returned at once"
    kind = HoldsMore if isinstance(outcome, Failed) and _is_out_of_memory(outcome.error) else ResizeFailed
    return kind(f"rank {rank} under {parallel} could not be built: {why}")


def _is_out_of_memory(error: Exception) -> bool:
    """Whether a GPU had too little, also for a communicator or a context, which torch has no error of its own for."""
    signs = ("out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)


def _picklable(error: Exception) -> Exception:
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
