"""Generations of ranks, and the handover between two: what actors/handover.py does, without Ray.

Each generation's ranks are processes of their own. An old rank shares its memory; the new rank in its slot maps it, and
gets the rest over gloo, or over NCCL where there are GPUs.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self

import torch
from host import TIMEOUT_S, Build, Host
from oracle import same_bits, whole_by_megatron
from ranks import Address, Place, Rank, Worker, finish_all
from tiny import MICRO_BATCH_SIZE, build

from ray_etc.actors import sharing
from ray_etc.actors.certificate import compare
from ray_etc.actors.context import Context
from ray_etc.actors.mover import MoveReport
from ray_etc.megatron import Task
from ray_etc.planners.layout import RankLayout
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.parallel import ParallelConfig, sources_of_streams
from ray_etc.planners.placement import known_tensors, place
from ray_etc.planners.plan import MigrationPlan

SLOTS_PER_NODE = 2
STAGING_NBYTES = 64 * 2**10
"""Less than any of these models needs, so that each move takes several rounds."""


class Generation:
    """A set of ranks that train together; `slots[r]` is where rank r lives."""

    def __init__(
        self, number: int, parallel: ParallelConfig, slots: Sequence[int], build: Build, where: Place = Worker
    ) -> None:
        self.number, self.parallel, self.slots = number, parallel, tuple(slots)
        self._folder = Path(tempfile.mkdtemp())
        self.ranks: list[Rank] = []
        for rank, slot in enumerate(self.slots):
            context = Context("test", number, parallel, rank, rank, parallel.world_size, 0, slot)
            make = partial(Host, context, build)
            self.ranks.append(where(make, Address(number, slot, rank, parallel.world_size, self._folder, TIMEOUT_S)))
        self.entered: list[tuple[RankLayout, sharing.SharedMemory]] = []

    def enter(self) -> Self:
        """Wait until each rank has its model and shares its memory."""
        self.entered = self.ask("enter")
        return self

    def ask(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `Host` on every rank at once; the answers by rank."""
        for rank in self.ranks:
            rank.start(method, *args)
        return finish_all(self.ranks)

    def whole(self) -> dict[str, torch.Tensor]:
        """The whole tensors, by the names of Megatron's checkpoints."""
        return whole_by_megatron(self.ask("named_parts"))

    def digests(self) -> dict[str, str]:
        """Of the replicated state, which is the same on every rank."""
        first, *others = [state.digests() for _, state in self.ask("small_state")]
        assert all(other == first for other in others), "ranks differ in replicated state"
        return first

    def layouts(self) -> dict[int, RankLayout]:
        return {slot: layout for slot, (layout, _) in zip(self.slots, self.entered, strict=True)}

    def close(self) -> None:
        """End its processes; once more does nothing."""
        for rank in self.ranks:
            rank.kill()
        self.ranks = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class Handover:
    """What a handover did."""

    plan: MigrationPlan
    reports: list[MoveReport]
    nbytes_on_the_wire: int

    def check(self) -> None:
        """Every byte that the plan counts was moved, and the wire carried no more than those and the alignment."""
        assert sum(report.nbytes_local for report in self.reports) == self.plan.nbytes_local
        assert sum(report.nbytes_sent for report in self.reports) == self.plan.nbytes_wire
        assert sum(report.nbytes_received for report in self.reports) == self.plan.nbytes_wire
        moves = sum(len(moves) for moves in self.plan.rounds)
        assert 0 <= self.nbytes_on_the_wire - self.plan.nbytes_wire < 16 * max(1, moves)
        wanted = sum(shard.nbytes for layout in self.plan.target for shard in layout)
        assert self.plan.nbytes_wire + self.plan.nbytes_local == wanted
        assert self.plan.nbytes_wire >= self.plan.nbytes_lower_bound


def start_next(
    old: Generation, parallel: ParallelConfig, usable: Sequence[int], build: Build, where: Place = Worker
) -> Generation:
    """The next generation, each rank in the slot of `usable` where most of its state is expected to be."""
    tensors = known_tensors(list(old.layouts().values()))
    assignment = place(tensors, old.layouts(), parallel, _nodes(usable))
    return Generation(old.number + 1, parallel, assignment.slot_of_rank, build, where)


def hand_over(old: Generation, new: Generation, usable: Sequence[int]) -> Handover:
    """Move everything from `old`, which stands between two steps, to `new`, which stands before its first."""
    new.enter()
    plan = make_plan(
        old.layouts(),
        new.layouts(),
        _nodes([*old.slots, *new.slots]),
        staging_nbytes=STAGING_NBYTES,
        usable=usable,
    )
    plan.check()
    members = [
        new.ranks[new.slots.index(slot)] if slot in new.slots else old.ranks[old.slots.index(slot)]
        for slot in plan.slots
    ]

    size = len(members)
    rendezvous, *_ = _ask_each(members, "open_migration", range(size), [size] * size)
    _ask_each(members, "connect_migration", [rendezvous] * size)
    shared = {slot: memory for slot, (_, memory) in zip(old.slots, old.entered, strict=True)}
    _ask_each(
        members,
        "prepare_move",
        [plan.for_rank(rank) for rank in range(size)],
        list(plan.source),
        [shared.get(slot) for slot in plan.slots],
        [slot in new.slots for slot in plan.slots],
    )
    moved = _ask_each(members, "move")
    reports = [report for report, _ in moved]
    compare(plan, reports)
    _load(old, new)
    _ask_each(members, "end_migration")
    return Handover(plan, reports, sum(nbytes for _, nbytes in moved))


def _load(old: Generation, new: Generation) -> None:
    small = old.ask("small_state")
    assert len({next_step for next_step, _ in small}) == 1
    held = {old.parallel.coordinate(rank): state.streams for rank, (_, state) in enumerate(small)}
    next_step, first = small[0]
    streams = []
    for rank in range(len(new.ranks)):
        wanted = new.parallel.coordinate(rank)
        streams.append({at: held[at] for at in sources_of_streams(held, wanted)})
    size = len(new.ranks)
    _ask_each(new.ranks, "load", [next_step] * size, [first.replicated] * size, streams)


def _ask_each(members: Sequence[Rank], method: str, *columns: Sequence[Any]) -> list[Any]:
    """Call a method on each member at once, with its own entry of each column."""
    for index, member in enumerate(members):
        member.start(method, *(column[index] for column in columns))
    return finish_all(members)


def _nodes(slots: Sequence[int]) -> dict[int, str]:
    return {slot: f"node{slot // SLOTS_PER_NODE}" for slot in slots}


@dataclass(frozen=True)
class Stage:
    """So many steps under one configuration; `elsewhere` on slots that the stage before did not use."""

    parallel: ParallelConfig
    steps: int
    elsewhere: bool = False
    change: Callable[[Task], None] | None = None
    """What a faulty handover would do to the state, done after it."""


@dataclass
class Run:
    """What came of a run, step by step."""

    losses: list[float] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)


def run(stages: Sequence[Stage], **model: Any) -> Run:
    """Train through the stages, with a handover between each two."""
    result = Run()
    numbers = count()
    make = partial(build, **model)
    with ExitStack() as stack:
        old: Generation | None = None
        for stage in stages:
            size = stage.parallel.world_size
            if old is None:
                new = stack.enter_context(Generation(next(numbers), stage.parallel, range(size), make)).enter()
            else:
                usable = slots_for(old.slots, size, stage.elsewhere)
                new = stack.enter_context(start_next(old, stage.parallel, usable, make))
                hand_over(old, new, usable).check()
                old.close()
            if stage.change is not None:
                new.ask("change", stage.change)
            by_rank = new.ask("train", stage.steps)
            for step in range(stage.steps):
                losses = {reports[step]["loss"] for reports in by_rank}
                assert len(losses) == 1, "the loss is not the same number on every rank"
                result.losses.append(losses.pop())
                result.samples.append(_samples([reports[step]["sample_ids"] for reports in by_rank], stage.parallel))
            old = new
        assert old is not None
        result.whole = old.whole()
    return result


def slots_for(held: Sequence[int], size: int, elsewhere: bool = False) -> list[int]:
    """Slots for `size` ranks: first those in use, as far as they go, or none of them."""
    if elsewhere:
        return list(range(max(held) + 1, max(held) + 1 + size))
    used = sorted(held)
    return (
        used if size <= len(used) else used + [slot for slot in range(8 * size) if slot not in used][: size - len(used)]
    )


def _samples(by_rank: Sequence[list[int]], parallel: ParallelConfig) -> list[int]:
    """What one step was trained on, in the order of micro-batches; all ranks of a replica saw the same."""
    by_data: dict[int, list[int]] = {}
    for rank, samples in enumerate(by_rank):
        replica = parallel.coordinate(rank).data // parallel.context_parallel
        assert by_data.setdefault(replica, samples) == samples
    replicas = [by_data[data] for data in range(parallel.data_parallel)]
    return [
        sample
        for first in range(0, len(replicas[0]), MICRO_BATCH_SIZE)
        for samples in replicas
        for sample in samples[first : first + MICRO_BATCH_SIZE]
    ]


def differing(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[str]:
    """The names under which the two do not hold the same bits."""
    return sorted(
        name for name in a.keys() | b.keys() if name not in a or name not in b or not same_bits(a[name], b[name])
    )
