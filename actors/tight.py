"""The move of a tight handover, as the driver runs it: phase by phase, each released by the old ranks once certified.

After the first release the old generation cannot go on, and until the last phase the new one cannot begin.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ray_etc.actors.certificate import compare
from ray_etc.actors.errors import StateLost
from ray_etc.actors.generation import Generation, Wait
from ray_etc.actors.phased import PhaseReport, phase_of
from ray_etc.actors.record import ResizeRecord
from ray_etc.planners.layout import Key
from ray_etc.planners.phases import PhasedPlan
from ray_etc.planners.plan import MigrationPlan
from ray_etc.planners.words import count, size


def peak_of_slots(
    plan: MigrationPlan, new: Collection[int], reports: Sequence[PhaseReport], of_old: Mapping[int, int]
) -> np.ndarray:
    """What the processes of each of the plan's slots had allocated at the worst moment: int64 [ranks].

    `new` are the slots with a new rank, which reports; beside it is what the old rank there had, `of_old` by slot. In
    the others the old rank itself reports.
    """
    beside = [of_old.get(slot_id, 0) if slot_id in new else 0 for slot_id in plan.slots]
    return np.array([report.nbytes_peak for report in reports], dtype=np.int64) + np.array(beside, dtype=np.int64)


class TightMove:
    """All phases of one handover.

    Args:
        plan: of all of the state; `phased` is the same plan in phases.
        members: one process a slot, in the order of the plan's ranks, connected as `group`.
    """

    def __init__(
        self,
        plan: MigrationPlan,
        phased: PhasedPlan,
        old: Generation,
        new: Generation,
        members: Sequence[Any],
        group: str,
        wait: Wait,
        timeout_s: float,
        record: ResizeRecord,
        direct_nbytes: int,
    ) -> None:
        self._plan, self._phased, self._old, self._new, self._members = plan, phased, old, new, members
        self._group, self._wait, self._timeout_s, self._record = group, wait, timeout_s, record
        self._direct_nbytes = direct_nbytes
        self._derived: Mapping[Key, Key] = old.derived
        self._shared = {slot.slot_id: each.shared for slot, each in zip(old.slots, old.entered, strict=True)}
        self.peak = np.zeros(len(plan.slots), dtype=np.int64)
        """What the processes of each slot had allocated at the worst moment so far, in bytes."""
        self._done = 0
        self.is_past_return = False
        """Whether the old generation has released any of its state."""

    def carry_out(self) -> None:
        """Move everything; the old ranks stand still. Afterwards the new ones can be mapped in their turn.

        Raises:
            StateLost: something failed after the first release.
        """
        try:
            self._carry_out()
        except Exception as error:
            if self.is_past_return:
                raise StateLost(self._where_the_state_is(error)) from error
            raise

    def _carry_out(self) -> None:
        if any(phase.is_cast for phase in self._phased.phases):
            with self._record.phase("check_derived"):
                self._wait([rank.check_derived.remote() for rank in self._old.ranks], self._timeout_s, "weights")
        held = self._release(self._phased.dropped)
        for phase in self._phased.phases:
            reports = self._move(self._done)
            # What the old rank released so far is not counted: this phase began after it.
            held = self._release(phase.released)
            self._done += 1
            self.peak = np.maximum(self.peak, peak_of_slots(self._plan, self._new.slot_ids, reports, held))
        self._record.nbytes_peak = int(self.peak.max())
        shared = self._wait(
            [rank.fill.remote() for rank in self._new.ranks], self._timeout_s, "the memory to be shared"
        )
        self._new.share(shared)

    def _move(self, index: int) -> list[PhaseReport]:
        phase = self._phased.phases[index]
        moving = []
        for rank, (member, slot_id) in enumerate(zip(self._members, self._plan.slots, strict=True)):
            is_new = slot_id in self._new.slot_ids
            whole = self._plan.source[rank], self._plan.target[rank]
            part = phase_of(self._phased, index, rank, whole, self._derived, self._direct_nbytes)
            memory = self._shared.get(slot_id) if is_new else None
            moving.append(member.move_phase.remote(self._group, part, memory, is_new, self._timeout_s))
        with self._record.phase("move"):
            reports: list[PhaseReport] = self._wait(
                moving, self._timeout_s, f"phase {index + 1} of {len(self._phased.phases)} to move"
            )
        for part_s in ("local", "wire", "certify"):
            seconds = max(getattr(report.move, f"{part_s}_s") for report in reports)
            self._record.phases[part_s] = self._record.phases.get(part_s, 0.0) + seconds
        with self._record.phase("certify"):
            compare(phase.plan, [report.move for report in reports])
        return reports

    def _release(self, numbers: Sequence[tuple[int, ...]]) -> dict[int, int]:
        """Have the old ranks give allocations back; what each slot's held until then."""
        of_slot = dict(zip(self._plan.slots, numbers, strict=True))
        self.is_past_return = self.is_past_return or any(numbers)
        with self._record.phase("release"):
            releasing = [
                rank.release.remote(of_slot[slot.slot_id])
                for rank, slot in zip(self._old.ranks, self._old.slots, strict=True)
            ]
            held = self._wait(releasing, self._timeout_s, "the old generation to release memory")
        return {slot.slot_id: nbytes for slot, nbytes in zip(self._old.slots, held, strict=True)}

    def _where_the_state_is(self, error: Exception) -> str:
        phases, index = self._phased.phases, self._done
        what = f"phase {index + 1} of {len(phases)}" if index < len(phases) else "what follows the phases"
        done = set().union(*(phase.tensors for phase in phases[:index]))
        dropped = {key for phase in phases[index:] if phase.is_cast for key in phase.tensors}
        rest = {shard.tensor.key for layout in self._plan.source for shard in layout} - done - dropped
        moved = sum(shard.nbytes for layout in self._plan.target for shard in layout if shard.tensor.key in done)
        words = [
            f"{what} of a tight handover failed: {type(error).__name__}: {error}",
            f"{count(len(done), 'tensor')} ({size(moved)}) of the state are only in the new generation, "
            f"{len(rest)} only in the old one",
        ]
        if dropped:
            words.append(f"{len(dropped)} are to be made from their main weights")
        return "; ".join(words) + ": neither can go on; start again from a checkpoint"
