"""One rank's part of a phase of a tight handover (see planners/phases.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ray_etc.actors import sharing
from ray_etc.actors.memory import StateMemory
from ray_etc.actors.mover import Mover, MoveReport
from ray_etc.actors.passes import Job, Pass, load
from ray_etc.actors.sums import as_integers
from ray_etc.actors.transports.base import Transport
from ray_etc.planners.layout import Key, RankLayout, TensorSpec, casts_of
from ray_etc.planners.rank_plan import RankPlan

if TYPE_CHECKING:  # no rank makes a plan, or loads what that takes
    from ray_etc.planners.phases import PhasedPlan

CHECKED_NUMEL = 1 << 26
"""Elements of main weights that are rounded at once to compare them with their weights."""


@dataclass(frozen=True)
class RankPhase:
    """What one rank does in a phase.

    `source` is what the old rank in its slot holds of it, or, where it casts, what it has main weights of itself.
    `held` and `wanted` are the positions of the phase's shards in the whole layouts of the old and the new rank.
    """

    plan: RankPlan
    source: RankLayout
    held: tuple[int, ...]
    wanted: tuple[int, ...]
    made: tuple[int, ...]
    direct_nbytes: int
    derived: Mapping[Key, Key] | None = None


@dataclass(frozen=True)
class PhaseReport:
    """What one rank did in a phase, or in a safe move, and the most that it had allocated meanwhile, in bytes."""

    move: MoveReport
    nbytes_peak: int


def phase_of(
    plan: PhasedPlan,
    index: int,
    rank: int,
    whole: tuple[RankLayout, RankLayout],
    derived: Mapping[Key, Key],
    direct_nbytes: int,
) -> RankPhase:
    """Phase `index` for one rank, whose slot holds `whole` before and after; for `direct_nbytes` see `Mover`."""
    phase = plan.phases[index]
    return RankPhase(
        phase.plan.for_rank(rank),
        phase.plan.source[rank],
        () if phase.is_cast else tuple(phase.positions(whole[0])),
        tuple(phase.positions(whole[1])),
        phase.made[rank],
        direct_nbytes,
        {key: derived[key] for key in phase.tensors} if phase.is_cast else None,
    )


def move_as_new(
    part: RankPhase,
    memory: StateMemory,
    layout: RankLayout,
    views: Sequence[torch.Tensor],
    shared: sharing.SharedMemory | None,
    transport: Transport | None,
    timeout_s: float,
    on_event: Callable[[str], None] = lambda event: None,
) -> PhaseReport:
    """As a new rank: make the memory of the phase, map that of the old rank in the slot, move, and unmap it again.

    `layout` and `views` are all of what this rank shall hold; `shared` is all of what the old one shared.
    """
    memory.reset_peak()
    memory.make(part.made)
    target, targets = [layout[n] for n in part.wanted], [views[n] for n in part.wanted]
    if part.derived is not None:
        sources = _cast(tuple(target), targets, layout, views, part.derived)
    else:
        sources = sharing.open(shared, part.held) if shared is not None else []
    ends = (sources, part.source, targets, tuple(target))
    mover = Mover(part.plan, transport, *ends, memory.device, part.direct_nbytes)
    return _run(mover, memory, timeout_s, on_event)


def move_as_old(
    part: RankPhase,
    memory: StateMemory,
    views: Sequence[torch.Tensor],
    transport: Transport | None,
    timeout_s: float,
    on_event: Callable[[str], None] = lambda event: None,
) -> PhaseReport:
    """As an old rank whose slot is leaving: send what others need."""
    memory.reset_peak()
    sources = [views[n] for n in part.held]
    mover = Mover(part.plan, transport, sources, part.source, [], (), memory.device, part.direct_nbytes)
    return _run(mover, memory, timeout_s, on_event)


def warm_up(device: torch.device) -> None:
    """Compile and load the kernels of a phase, for slices of up to three dims: its memory comes only in the pause."""
    if device.type != "cuda":
        return
    sums, ticket = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    cube, twin = (torch.zeros(4, 4, 4, dtype=torch.int32, device=device) for _ in range(2))
    for part in (slice(None), slice(None), slice(None)), (slice(None), 0, slice(None)), (slice(2),) * 3:
        source, target = cube[part], twin[part]
        both = Job(source, target, left=0, arrived=1)
        others = (
            both,
            Job(source, target, left=0),
            Job(source, target, arrived=1),
            Job(source, None, left=0),
            Job(None, target, arrived=1),
        )
        load([Pass([both], sums, ticket=ticket), *(Pass([job], sums) for job in others)])
    torch.cuda.current_stream(device).synchronize()


def check_derived(layout: RankLayout, views: Sequence[torch.Tensor], derived: Mapping[Key, Key]) -> None:
    """Check that weights are exactly their main weights, rounded, where a rank holds both.

    Raises:
        ValueError: names the first tensor that is not.
    """
    for tensor, weight, main in pairs_of_derived(layout, views, derived):
        if not torch.equal(as_integers(weight), as_integers(main.to(weight.dtype))):
            raise ValueError(
                f"{tensor.kind} {tensor.name} is not its main weight, rounded: the weights were changed behind the "
                "optimizer's back, and cannot be made anew from it"
            )


def pairs_of_derived(
    layout: RankLayout, views: Sequence[torch.Tensor], derived: Mapping[Key, Key]
) -> Iterator[tuple[TensorSpec, torch.Tensor, torch.Tensor]]:
    """Where a rank holds both: a tensor, some of it, and what that is the rounded value of, `CHECKED_NUMEL` at most."""
    numbers = [number for number, shard in enumerate(layout) if shard.tensor.key in derived]
    weights = tuple(layout[number] for number in numbers)
    for tensor, box, place, main in casts_of(weights, layout, derived):
        weight = views[numbers[place]][box.slices_in(weights[place].box)]
        full = views[main][box.slices_in(layout[main].box)]
        if not weight.dim():
            yield tensor, weight, full
            continue
        rows = max(1, CHECKED_NUMEL // max(1, weight[:1].numel()))
        for part, whole in zip(weight.split(rows), full.split(rows), strict=True):
            yield tensor, part, whole


def _cast(
    target: RankLayout,
    targets: Sequence[torch.Tensor],
    layout: RankLayout,
    views: Sequence[torch.Tensor],
    derived: Mapping[Key, Key],
) -> list[torch.Tensor]:
    """Round main weights into the weights; the parts that are written, in the order of `casts_of`."""
    written = []
    for _, box, place, main in casts_of(target, layout, derived):
        into = targets[place].detach()[box.slices_in(target[place].box)]
        into.copy_(views[main].detach()[box.slices_in(layout[main].box)])
        written.append(into)
    return written


def _run(mover: Mover, memory: StateMemory, timeout_s: float, on_event: Callable[[str], None]) -> PhaseReport:
    staging_nbytes = mover.prepare()
    try:
        report = mover.run(timeout_s, on_event)
    finally:
        mover.close()
        memory.trim()
    return PhaseReport(report, memory.nbytes_peak(staging_nbytes))
