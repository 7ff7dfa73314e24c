"""What one resize did, as data."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.plan import MigrationPlan


@dataclass
class ResizeRecord:
    """One resize, from the decision to the first step after it.

    Times are in seconds, moments in Unix time. `pause_s` runs from the end of the last step of the old generation
    to the start of the first step of the new one; `phases` holds how long each part took, `phases_began_at` when each
    began first. "prepare" consists of "start", "import", "join", "build" and "warm_up", each as long as the rank took
    that was slowest in it. `error` says why a resize was given up; training then went on in the old generation, or a
    recovery was tried again.

    `move_s_predicted` is what the plan expects of the move and its certificate, by the trainer's `links`.

    `memory_mode` is "safe" where the old state stays whole until the commit, else "tight": it is released phase by
    phase, and after the first release the old generation cannot go on. `nbytes_peak` is the most that the processes of
    any slot had allocated while the state moved, by torch's allocator, or counted from the state on CPUs: old and new
    state, staging, what each process keeps from step to step besides and, in the safe mode, gradients; nothing of a
    step, since none runs then. `nbytes_peak_predicted` is what the plan expects of that. A recovery has neither:
    survivors stand still inside a step.
    """

    generation: int
    reason: str
    parallel_from: ParallelConfig
    parallel_to: ParallelConfig
    deadline: float | None = None
    next_step: int | None = None
    nbytes_wire: int = 0
    nbytes_local: int = 0
    nbytes_lower_bound: int = 0
    move_s_predicted: float = 0.0
    memory_mode: str = "safe"
    nbytes_peak_predicted: int = 0
    nbytes_peak: int | None = None
    phases: dict[str, float] = field(default_factory=dict)
    phases_began_at: dict[str, float] = field(default_factory=dict)
    paused_at: float | None = None
    pause_s: float | None = None
    certified: bool = False
    error: str | None = None
    plan: MigrationPlan | None = field(default=None, repr=False)

    @property
    def is_requested(self) -> bool:
        """Whether the user asked for it."""
        return self.reason == "requested"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to `phases[name]`."""
        self.phases_began_at.setdefault(name, time.time())
        start = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - start

    def take_in_stages(self, ranks: Iterable[Mapping[str, float]]) -> None:
        """Adds what "prepare" consists of, by the `stages` of each new rank's session."""
        for stages in ranks:
            began = [("start", self.phases_began_at["prepare"]), *sorted(stages.items(), key=lambda each: each[1])]
            for (name, at), (_, until) in pairwise(began):
                self.phases[name] = max(self.phases.get(name, 0.0), until - at)
                self.phases_began_at[name] = min(self.phases_began_at.get(name, at), at)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, without the plan."""
        return {
            "generation": self.generation,
            "reason": self.reason,
            "parallel_from": asdict(self.parallel_from),
            "parallel_to": asdict(self.parallel_to),
            "nbytes_wire": self.nbytes_wire,
            "nbytes_local": self.nbytes_local,
            "nbytes_lower_bound": self.nbytes_lower_bound,
            "move_s_predicted": self.move_s_predicted,
            "memory_mode": self.memory_mode,
            "nbytes_peak_predicted": self.nbytes_peak_predicted,
            "nbytes_peak": self.nbytes_peak,
            "pause_s": self.pause_s,
            "phases": dict(self.phases),
            "phases_began_at": dict(self.phases_began_at),
            "certified": self.certified,
            "next_step": self.next_step,
            "deadline": self.deadline,
            "error": self.error,
        }
