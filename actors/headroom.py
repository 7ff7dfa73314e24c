"""What each slot has room for while two generations are in it, and the memory mode that follows.

Each generation leaves room for the next from its start (`memory.limit_training`). Before a resize
starts anything, and again when its plan is there, `Headroom.choose` compares what it needs with what there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ray_etc.actors.generation import Generation, TrainJob, Wait
from ray_etc.actors.memory import COMMUNICATOR_NBYTES, SHADOW_NBYTES
from ray_etc.actors.messages import Usage
from ray_etc.actors.record import ResizeRecord
from ray_etc.actors.slots import Slot
from ray_etc.planners.errors import DoesNotFit
from ray_etc.planners.expected import expected_layouts
from ray_etc.planners.layout import Allocations, TensorSpec
from ray_etc.planners.links import Links
from ray_etc.planners.memory import choose_mode, memory_of, staging_of
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.phases import PhasedPlan, cut_in_phases
from ray_etc.planners.plan import MigrationPlan


@dataclass(frozen=True, eq=False)
class Choice:
    """`phased` is None in the safe mode. `releases_early`: there is no room for the old state beside the new
    generation's first step, so it is released before that begins. `nbytes_peak`: see `ResizeRecord`."""

    phased: PhasedPlan | None
    releases_early: bool
    nbytes_peak: int

    @property
    def mode(self) -> str:
        return "safe" if self.phased is None else "tight"


def find_headroom(
    old: Generation,
    slots: Sequence[Slot],
    tensors: Sequence[TensorSpec],
    job: TrainJob,
    wait: Wait,
    record: ResizeRecord,
) -> Headroom:
    """Choose the record's memory mode by what new ranks in `slots` are expected to hold, before any of them is started.

    Raises:
        DoesNotFit: a slot has too little memory in either mode, also once torch has given back what it keeps for later.
    """
    target = dict(zip((s.slot_id for s in slots), expected_layouts(tensors, record.parallel_to), strict=True))
    nodes = {slot.slot_id: slot.node_name for slot in [*old.slots, *slots]}
    leaving = [slot_id for slot_id in old.slot_ids if slot_id not in target]
    for trims in (False, True):
        headroom = Headroom.of(old, job, wait, trims)
        if not headroom.is_limited:
            break
        plan = make_plan(old.layouts(), target, nodes, endangered=leaving, links=job.links)
        allocations = {slot_id: Allocations.expected(layout) for slot_id, layout in target.items()}
        try:
            choice = headroom.choose(plan, allocations)
        except DoesNotFit:
            if trims:
                raise
            continue
        record.memory_mode, record.nbytes_peak_predicted = choice.mode, choice.nbytes_peak
        if choice.mode == "safe":
            break
    return headroom


class Headroom:
    """What a running generation leaves of each of its slots.

    Args:
        limit_nbytes: what all processes of a slot may have together; None for all of a GPU, or no limit on CPUs.
        links: the speeds that phases are planned by, and how large a slice needs no staging.
    """

    def __init__(
        self, old: Generation, limit_nbytes: int | None, usages: Mapping[int, Usage], links: Links | None = None
    ) -> None:
        self._old, self._limit_nbytes, self._usages, self._links = old, limit_nbytes, usages, links or Links()

    @classmethod
    def of(cls, old: Generation, job: TrainJob, wait: Wait, trims: bool) -> Headroom:
        asking = [rank.usage.remote(trims, job.timeout_s) for rank in old.ranks]
        usages = wait(asking, job.timeout_s, "the ranks' memory")
        by_slot = {slot.slot_id: each for slot, each in zip(old.slots, usages, strict=True)}
        return cls(old, job.slot_nbytes, by_slot, job.links)

    @property
    def is_limited(self) -> bool:
        return self._limit_nbytes is not None or any(each.total is not None for each in self._usages.values())

    def choose(
        self, plan: MigrationPlan, new: Mapping[int, Allocations], room: Mapping[int, int] | None = None
    ) -> Choice:
        """The memory mode for a plan whose new ranks have allocations `new`, by slot.

        `room` is what those that are there already have for their state: `Entered.room`, by slot. Until then it is
        guessed how much their processes take besides.

        Raises:
            DoesNotFit: in neither mode.
        """
        memory = memory_of(plan)
        old = {slot.slot_id: each.allocations for slot, each in zip(self._old.slots, self._old.entered, strict=True)}
        free, reserved, kept, beside, scratch = self._free(plan, memory.after, room or {})
        safe_peak = self._held(plan, old, new) + kept + beside + scratch
        if not self.is_limited:
            return Choice(None, False, int(safe_peak.max(initial=0)))
        safe_room = free + memory.before - scratch
        # Where not even an empty process fits beside the training, there is no shadow to build anything in.
        tight_room = np.where(free < 0, free, free + reserved - kept)
        if (memory.safe <= safe_room).all():
            steps = reserved - memory.before
            early = bool((memory.safe + np.maximum(steps, 0) > safe_room).any())
            return Choice(None, early, int(safe_peak.max(initial=0)))
        phased = cut_in_phases(plan, old, new, self._old.derived, self._links)
        # Once everything is there, the new ranks make their scratch memory.
        choose_mode(plan, memory.safe, np.maximum(phased.peak, memory.after + scratch), safe_room, tight_room)
        return Choice(phased, True, int((phased.peak + kept + beside).max(initial=0)))

    def _held(self, plan: MigrationPlan, old: Mapping[int, Allocations], new: Mapping[int, Allocations]) -> np.ndarray:
        """What the old state with its scratch memory, the new state and staging take of each slot: int64 [ranks]."""
        is_on_gpus = any(each.total is not None for each in self._usages.values())
        held = staging_of(plan, self._links.direct_nbytes if is_on_gpus else None)
        for rank, slot_id in enumerate(plan.slots):
            held[rank] += sum(sum(side[slot_id].nbytes) for side in (old, new) if slot_id in side)
            held[rank] += self._usages[slot_id].scratch if slot_id in self._usages else 0
        return held

    def _free(self, plan: MigrationPlan, after: np.ndarray, room: Mapping[int, int]) -> tuple[np.ndarray, ...]:
        """Of each rank of the plan, in bytes: what is free for the state of a new process while the old one trains;
        what torch has there for the old one; what of that it keeps to its end; what the new one will keep besides its
        state; what it needs for scratch memory."""
        free, reserved, kept, scratch = (np.zeros(len(plan.slots), dtype=np.int64) for _ in range(4))
        totals = [each.total for each in self._usages.values() if each.total is not None]
        beside = np.where(after, max((each.kept for each in self._usages.values()), default=0), 0)
        for rank, slot_id in enumerate(plan.slots):
            usage = self._usages.get(slot_id) or Usage(max(totals, default=None), max(totals, default=None), 0, 0)
            reserved[rank], kept[rank] = usage.reserved, usage.kept
            if usage.total is None or usage.free is None:
                free[rank] = (self._limit_nbytes or 0) - usage.reserved
            else:
                beyond_limit = usage.total - min(usage.total, self._limit_nbytes or usage.total)
                free[rank] = usage.free - beyond_limit - beside[rank] - (SHADOW_NBYTES if after[rank] else 0)
                seen = room.get(slot_id, usage.total) - beyond_limit - COMMUNICATOR_NBYTES
                free[rank] = min(free[rank], seen)
        weights = plan.source.nbytes_by_kind().get("param")
        scratch_of = [(u.scratch, weights[plan.slots.index(s)]) for s, u in self._usages.items() if weights is not None]
        per_byte = max((held / max(int(of), 1) for held, of in scratch_of), default=0.0)
        wanted = plan.target.nbytes_by_kind().get("param", np.zeros_like(after))
        scratch[:] = wanted * per_byte
        return free, reserved, kept, beside, scratch
