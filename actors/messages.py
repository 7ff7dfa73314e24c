"""What ranks and the driver tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ray_etc.actors.sharing import SharedMemory
from ray_etc.actors.small_state import SmallState
from ray_etc.planners.layout import Allocations, Key, RankLayout
from ray_etc.planners.parallel import Coordinate


@dataclass(frozen=True)
class Entered:
    """A rank that has built its model: what it holds, and how another process in its slot can map it.

    `shared` is None while its memory is emptied for a tight handover. `derived` is that of its `TrainState`, `stages`
    of its `Session`, `room` as of `StateMemory.room`.
    """

    layout: RankLayout
    shared: SharedMemory | None
    allocations: Allocations
    derived: dict[Key, Key] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    room: int | None = None


@dataclass(frozen=True)
class Usage:
    """The memory of a rank's GPU in bytes, and what this process has of it: `reserved` by torch, in all.

    `kept` is what it holds between two steps besides state and `scratch` memory: a second model of the user's, say.
    `total` and `free` are None on CPUs, where `reserved` is that of the state and its `scratch` memory.
    """

    total: int | None
    free: int | None
    reserved: int
    scratch: int
    kept: int = 0


@dataclass(frozen=True)
class Boundary:
    """The moment between two steps: `next_step` steps are whole, `small_state` is that of this moment."""

    next_step: int
    small_state: SmallState
    ended_at: float
    digests: dict[str, str] = field(default_factory=dict)
    """Of each replicated item; filled in where the boundary leaves the rank."""
    is_whole: bool = True
    """False where the step made no update: gradients that it may have gathered for a later one are not moved."""
    nbytes_allocated: int = 0
    """What this process has allocated while it is paused; filled in where the boundary leaves the rank."""


@dataclass(frozen=True)
class Load:
    """The small state of the old generation, for a new rank to take over."""

    next_step: int
    replicated: bytes
    streams: dict[Coordinate, bytes]


@dataclass(frozen=True)
class Report:
    """What a rank reported in a step."""

    step: int
    metrics: dict[str, Any]
    checkpoint: Any = None


@dataclass(frozen=True)
class Progress:
    """How a rank's first step went, and the reports since the last time it was asked."""

    first_step_started_at: float | None
    first_step_s: float | None
    reports: list[Report]
