"""Memory: what each rank needs at the worst moment of a handover, if the old state is kept until the end or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ray_etc.planners.plan import MigrationPlan

TIGHT_ORDER = ("exp_avg", "exp_avg_sq", "main_param")
"""Kinds of state in the order in which the tight mode moves and releases them; all others come after."""

STAGING_BUFFERS = 3
"""Staging buffers each way: one being packed or unpacked, one on the wire, one to spare. Rounds take them in
turn, and each is as large as the largest of its rounds."""


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes of each rank: int64 [ranks] each.

    Args:
        before, after: the state it holds in the end of the old generation, and in the beginning of the new one.
        staging: the buffers of the handover.
        safe: the peak where the old state stays whole until the commit, so that a failed move rolls back.
        tight: the peak where one kind of state is moved at a time, and released before the next is made.
    """

    before: np.ndarray
    after: np.ndarray
    staging: np.ndarray
    safe: np.ndarray
    tight: np.ndarray

    def mode_for(self, nbytes: int) -> str | None:
        """The mode in which no rank needs more than `nbytes`: "safe", else "tight", else None."""
        for mode in ("safe", "tight"):
            if int(getattr(self, mode).max(initial=0)) <= nbytes:
                return mode
        return None


def memory_of(plan: MigrationPlan) -> Memory:
    """What `plan` needs on each rank of it, without what the processes need besides (contexts, activations)."""
    rank_count = len(plan.slots)
    staging = np.zeros(rank_count, dtype=np.int64)
    wire = np.flatnonzero(plan.moves.round >= 0)
    for end in plan.ends:
        cell, where = np.unique(end[wire] * max(plan.round_count, 1) + plan.moves.round[wire], return_inverse=True)
        total = np.zeros(len(cell), dtype=np.int64)
        np.add.at(total, where, plan.move_nbytes[wire])
        rank, index = np.divmod(cell, max(plan.round_count, 1))
        largest = np.zeros((rank_count, STAGING_BUFFERS), dtype=np.int64)
        np.maximum.at(largest, (rank, index % STAGING_BUFFERS), total)
        staging += largest.sum(axis=1)
    held, wanted = plan.source.nbytes_by_kind(), plan.target.nbytes_by_kind()
    nothing = np.zeros(rank_count, dtype=np.int64)
    before, after = (sum(kinds.values(), start=nothing) for kinds in (held, wanted))
    left, made, tight = before.copy(), nothing.copy(), nothing.copy()
    kinds = held.keys() | wanted.keys()
    for kind in sorted(kinds, key=lambda k: (TIGHT_ORDER.index(k) if k in TIGHT_ORDER else len(TIGHT_ORDER), k)):
        made = made + wanted.get(kind, nothing)
        tight = np.maximum(tight, left + made)
        left = left - held.get(kind, nothing)
    return Memory(before, after, staging, before + after + staging, tight + staging)
