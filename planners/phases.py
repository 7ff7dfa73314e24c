"""Phases: a handover that moves a few tensors at a time, and releases what held them before it makes room for the next.

What can only be released as a whole is an allocation: Megatron's distributed optimizer keeps all bf16 weights of a rank
in one, and moments and main weights in one a parameter. Tensors that share an allocation on any rank go in one phase.
Weights that are exactly their main weights, rounded, need no memory on both sides: the old ones are dropped first, and
the new ones are made last, from the new main weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from ray_etc.planners.layout import Allocations, Key, RankLayout, Shard, casts_of
from ray_etc.planners.links import Links
from ray_etc.planners.memory import SLACK, TIGHT_ORDER, staging_of
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.plan import MigrationPlan


@dataclass(frozen=True, eq=False)
class Phase:
    """Part of a tight handover, the same on all ranks.

    `plan` is between the parts of the layouts that are of `tensors`; positions in it count only those shards. Before
    it, new rank r makes its allocations `made[r]`; after its certificate, old rank r releases `released[r]`. Where
    `is_cast`, the new ranks first cast what they have main weights of, and that is the source of `plan`: each new
    rank's shards of `plan.source` are parts of its own new weights.
    """

    tensors: frozenset[Key]
    plan: MigrationPlan
    made: tuple[tuple[int, ...], ...]
    released: tuple[tuple[int, ...], ...]
    is_cast: bool = False

    def positions(self, layout: RankLayout) -> list[int]:
        """Which shards of a rank's whole layout are of this phase."""
        return [position for position, shard in enumerate(layout) if shard.tensor.key in self.tensors]


@dataclass(frozen=True, eq=False)
class PhasedPlan:
    """A plan cut into phases.

    `dropped[r]` are the allocations that old rank r releases before the first phase. `staging` and `peak` are bytes of
    each rank, int64 [ranks]: the largest buffers of any phase, and the most that the old and the new process of a slot
    hold together, buffers included.
    """

    phases: tuple[Phase, ...]
    dropped: tuple[tuple[int, ...], ...]
    staging: np.ndarray
    peak: np.ndarray

    @property
    def nbytes_wire(self) -> int:
        return sum(phase.plan.nbytes_wire for phase in self.phases)

    @property
    def nbytes_local(self) -> int:
        return sum(phase.plan.nbytes_local for phase in self.phases)


def cut_in_phases(
    plan: MigrationPlan,
    old: Mapping[int, Allocations],
    new: Mapping[int, Allocations],
    derived: Mapping[Key, Key] | None = None,
    links: Links | None = None,
) -> PhasedPlan:
    """Cut `plan` so that no rank holds more than `1 + SLACK` times the larger of its old and new state, and staging.

    `old` and `new` are by slot. `derived` says of which tensor another is exactly the rounded value; `links` are the
    speeds by which sources are chosen. Where one allocation is too large for that bound, the peak is the least that
    moving it as a whole allows.

    Raises StateMissing as `make_plan` does.
    """
    steps = _steps(plan, old, new)
    before, after = (
        np.array([sum(side[slot].nbytes) if slot in side else 0 for slot in plan.slots], dtype=np.int64)
        for side in (old, new)
    )
    larger = np.maximum(before, after)
    aim = ((1 + SLACK) * larger).astype(np.int64)

    def excess(way: tuple[list[_Step], list[_Step]]) -> float:
        """By how much the peak of moving some steps, then casting others, is above the bound, as a share."""
        moved, cast = way
        peak = np.maximum(_peaks(moved, before - sum(step.freed for step in cast)), after)
        return float(((peak - aim) / np.maximum(larger, 1)).max(initial=0.0))

    castable = [step for step in steps if derived and step.tensors <= derived.keys()]
    ways: list[tuple[list[_Step], list[_Step]]] = [
        (steps, []),
        (sorted(steps, key=lambda step: step.is_optimizer), []),
        ([step for step in steps if step not in castable], castable),
    ]
    ways = [(_balanced(moved, before - sum(step.freed for step in cast), larger), cast) for moved, cast in ways]
    moved, cast = min(ways, key=excess)  # the first of those that are equal
    held = before - sum((step.freed for step in cast), start=np.zeros_like(before))
    groups = _grouped(moved, held, np.maximum(aim, _peaks(moved, held)))
    phases = [_phase(plan, group, *_parts(plan, group), links) for group in groups]
    if cast:
        groups.append(cast)
        phases.append(_cast_phase(plan, cast, derived or {}, links))
    peak, staging = before, np.zeros_like(before)
    for phase, group in zip(phases, groups, strict=True):
        buffers = staging_of(phase.plan)
        held = held + sum(step.taken for step in group)
        peak, staging = np.maximum(peak, held + buffers), np.maximum(staging, buffers)
        held = held - (0 if phase.is_cast else sum(step.freed for step in group))
    return PhasedPlan(tuple(phases), _by_rank(cast, "released", len(plan.slots)), staging, peak)


@dataclass(frozen=True, eq=False)
class _Step:
    """Tensors that share allocations: the least that can be moved by itself. `taken` and `freed`: int64 [ranks]."""

    tensors: frozenset[Key]
    made: tuple[tuple[int, ...], ...]
    released: tuple[tuple[int, ...], ...]
    taken: np.ndarray
    freed: np.ndarray

    @property
    def is_optimizer(self) -> bool:
        return self.turn < len(TIGHT_ORDER)

    @property
    def turn(self) -> int:
        """When its kind of state is moved."""
        place = {kind: number for number, kind in enumerate(TIGHT_ORDER)}
        return min(place.get(kind, len(place)) for kind, _ in self.tensors)


def _steps(plan: MigrationPlan, old: Mapping[int, Allocations], new: Mapping[int, Allocations]) -> list[_Step]:
    """All steps, optimizer state first."""
    leader: dict[Key, Key] = {}

    def find(key: Key) -> Key:
        while leader.setdefault(key, key) != key:
            leader[key] = key = leader[leader[key]]
        return key

    sides = (("released", plan.source, old), ("made", plan.target, new))
    held: dict[tuple[str, int, int], Key] = {}
    for side, layouts, allocations in sides:
        for rank, slot in enumerate(plan.slots):
            for position, shard in enumerate(layouts[rank]):
                where = (side, rank, allocations[slot].of_shard[position])
                leader[find(shard.tensor.key)] = find(held.setdefault(where, shard.tensor.key))
    members: dict[Key, list[Key]] = {}
    for key in leader:
        members.setdefault(find(key), []).append(key)
    owned: dict[Key, dict[str, list[list[int]]]] = {
        root: {side: [[] for _ in plan.slots] for side, *_ in sides} for root in members
    }
    nbytes = {root: {side: np.zeros(len(plan.slots), dtype=np.int64) for side, *_ in sides} for root in members}
    by_side = {side: allocations for side, _, allocations in sides}
    for (side, rank, number), key in held.items():
        owned[find(key)][side][rank].append(number)
        nbytes[find(key)][side][rank] += by_side[side][plan.slots[rank]].nbytes[number]
    found = [
        _Step(
            frozenset(keys),
            tuple(map(tuple, owned[root]["made"])),
            tuple(map(tuple, owned[root]["released"])),
            nbytes[root]["made"],
            nbytes[root]["released"],
        )
        for root, keys in members.items()
    ]
    return sorted(found, key=lambda step: step.turn)


def _balanced(order: Sequence[_Step], held: np.ndarray, larger: np.ndarray) -> list[_Step]:
    """Each kind's steps in an order in which no rank gets much of the new state before it has released of its old.

    `held` is what ranks hold before the first, `larger` what they hold at most in the beginning or the end.
    """
    found: list[_Step] = []
    share = 1.0 / np.maximum(larger, 1)
    for _, group in groupby(order, key=lambda step: step.turn):
        steps = list(group)
        taken, freed = (np.array([getattr(step, side) for step in steps]) for side in ("taken", "freed"))
        left = np.arange(len(steps))
        while len(left):
            fullest = ((held + taken[left]) * share).max(axis=1)
            after = ((held + taken[left] - freed[left]) * share).max(axis=1)
            at = int(np.lexsort((after, fullest))[0])
            chosen = int(left[at])
            left = np.delete(left, at)
            found.append(steps[chosen])
            held = held + taken[chosen] - freed[chosen]
    return found


def _peaks(order: Sequence[_Step], held: np.ndarray) -> np.ndarray:
    """The most that each rank holds where every step is a phase of its own, without staging: int64 [ranks]."""
    peak = held.copy()
    for step in order:
        peak = np.maximum(peak, held + step.taken)
        held = held + step.taken - step.freed
    return peak


def _grouped(order: Sequence[_Step], held: np.ndarray, bound: np.ndarray) -> list[list[_Step]]:
    """Steps put together in order, as many as keep every rank within its bound."""
    groups: list[list[_Step]] = []
    taken = np.zeros_like(held)
    for step in order:
        if not groups or (held + taken + step.taken > bound).any():
            held = (
                held + taken - sum((each.freed for each in (groups[-1] if groups else [])), start=np.zeros_like(held))
            )
            taken = np.zeros_like(held)
            groups.append([])
        groups[-1].append(step)
        taken = taken + step.taken
    return groups


def _parts(plan: MigrationPlan, steps: Sequence[_Step]) -> tuple[dict[int, RankLayout], dict[int, RankLayout]]:
    tensors = _tensors(steps)
    source, target = (
        {
            slot: tuple(shard for shard in layouts[rank] if shard.tensor.key in tensors)
            for rank, slot in enumerate(plan.slots)
        }
        for layouts in (plan.source, plan.target)
    )
    return source, target


def _phase(
    plan: MigrationPlan,
    steps: Sequence[_Step],
    source: Mapping[int, RankLayout],
    target: Mapping[int, RankLayout],
    links: Links | None,
    is_cast: bool = False,
) -> Phase:
    part = make_plan(
        source,
        target,
        dict(zip(plan.slots, plan.nodes, strict=True)),
        staging_nbytes=plan.staging_nbytes,
        endangered=[plan.slots[rank] for rank in plan.endangered],
        links=links,
    )
    nothing: tuple[tuple[int, ...], ...] = ((),) * len(plan.slots)
    return Phase(
        _tensors(steps),
        part,
        _by_rank(steps, "made", len(plan.slots)),
        nothing if is_cast else _by_rank(steps, "released", len(plan.slots)),
        is_cast,
    )


def _cast_phase(plan: MigrationPlan, steps: Sequence[_Step], derived: Mapping[Key, Key], links: Links | None) -> Phase:
    """Each new rank casts its own main weights; what it needs besides comes from the others that have cast it."""
    _, target = _parts(plan, steps)
    cast = {
        slot: tuple(Shard(tensor, box) for tensor, box, _, _ in casts_of(target[slot], plan.target[rank], derived))
        for rank, slot in enumerate(plan.slots)
    }
    return _phase(plan, steps, cast, target, links, is_cast=True)


def _tensors(steps: Sequence[_Step]) -> frozenset[Key]:
    return frozenset(key for step in steps for key in step.tensors)


def _by_rank(steps: Sequence[_Step], side: str, rank_count: int) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(sorted(number for step in steps for number in getattr(step, side)[rank])) for rank in range(rank_count)
    )
