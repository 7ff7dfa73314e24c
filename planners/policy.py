"""The decision: what to do about the slots there are, as a value that can be logged and tested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ray_etc.planners.parallel import ParallelConfig


@dataclass(frozen=True)
class Noop:
    """Train on; `why` names what keeps a wished-for change from happening, if anything does."""

    why: str = ""


@dataclass(frozen=True)
class Resize:
    """Move to `parallel` on some of `slots`, before `deadline` (Unix time) where there is one."""

    slots: tuple[int, ...]
    parallel: ParallelConfig
    reason: str
    deadline: float | None = None


@dataclass(frozen=True)
class Recover:
    """Ranks died: move what the survivors hold to `parallel` on some of `slots`."""

    slots: tuple[int, ...]
    parallel: ParallelConfig
    reason: str


Decision = Noop | Resize | Recover


@dataclass(frozen=True)
class Situation:
    """All that a decision depends on.

    Args:
        parallel: the running configuration.
        usable: slots that a new rank may be put in.
        draining: slots in use whose node will go, with the deadline (Unix time).
        dead_ranks: ranks of the running generation that died.
        warm: usable slots in which a new rank would stand at once; only given where that is so in every slot of the
            survivors.
        requested: a configuration that the user asked for.
        at_least, at_most: how many ranks are allowed and wanted.
        is_settled: no slot has come or gone in the last moments, so that a node's slots are taken together.
    """

    parallel: ParallelConfig
    usable: tuple[int, ...]
    draining: Mapping[int, float] = field(default_factory=dict)
    dead_ranks: tuple[int, ...] = ()
    warm: tuple[int, ...] = ()
    requested: ParallelConfig | None = None
    at_least: int = 1
    at_most: int = 1
    is_settled: bool = True


def decide(situation: Situation, largest: Callable[[int], ParallelConfig | None]) -> Decision:
    """What to do now. `largest(n)` is the largest valid configuration for at most n ranks, or None."""
    number = min(situation.at_most, len(situation.usable))
    fitting = largest(number)
    if fitting is not None and fitting.world_size < situation.at_least:
        fitting = None
    if situation.dead_ranks:
        who = ", ".join(str(rank) for rank in situation.dead_ranks)
        if fitting is None:
            return Noop(
                f"rank {who} died; waiting for slots: {number} are usable, at least {situation.at_least} are needed"
            )
        # Nobody trains meanwhile: whatever is slower to start joins later, beside a generation that does.
        quick = largest(min(situation.at_most, len(situation.warm)))
        if quick is not None and quick.world_size >= situation.at_least:
            return Recover(situation.warm, quick, f"rank {who} died")
        return Recover(situation.usable, fitting, f"rank {who} died")
    if situation.draining:
        deadline = min(situation.draining.values())
        if fitting is None:
            return Noop(f"a node is draining; {number} slots would be left, at least {situation.at_least} are needed")
        return Resize(situation.usable, fitting, "node draining", deadline)
    if situation.requested is not None:
        if situation.requested.world_size > len(situation.usable):
            return Noop(f"{situation.requested} waits for slots: {len(situation.usable)} are usable")
        return Resize(situation.usable, situation.requested, "requested")
    if fitting is not None and fitting.world_size > situation.parallel.world_size:
        if not situation.is_settled:
            return Noop("slots are still arriving")
        return Resize(situation.usable, fitting, "slots joined")
    return Noop()
