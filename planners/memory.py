"""Memory: what each rank needs at the worst moment of a handover, if the old state is kept until the end or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ray_etc.planners.errors import DoesNotFit

if TYPE_CHECKING:
    from ray_etc.planners.plan import MigrationPlan

TIGHT_ORDER = ("exp_avg", "exp_avg_sq", "main_param", "main_param_remainder")
"""Kinds of state in the order in which the tight mode moves and releases them; all others come after."""

SLACK = 0.08
"""In the tight mode a rank holds at most this share more than the larger of its old and its new state, and staging."""

STAGING_NBYTES = 512 * 2**20
"""What a rank sends, and what it receives, in one round: so large must messages be for the best rate seen of NCCL."""

STAGING_BUFFERS = 3
"""Staging buffers each way: one being packed or unpacked, one on the wire, one to spare. Rounds take them in
turn, and each is as large as the largest of its rounds."""

ALIGNMENT = 16
"""Each packed slice starts at a multiple of this many bytes."""


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes of each rank: int64 [ranks] each.

    Args:
        before, after: the state it holds in the end of the old generation, and in the beginning of the new one.
        staging: the buffers of the handover.
        safe: the peak where the old state stays whole until the commit, so that a failed move rolls back.
        tight: at most the peak where a few tensors at a time are moved, and released before the next are made, if
            memory lies as Megatron lays it; `phases.cut_in_phases` knows it from the ranks' own allocations.
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
    staging = staging_of(plan)
    before, after = (
        sum(table.nbytes_by_kind().values(), start=np.zeros(len(plan.slots), np.int64))
        for table in (plan.source, plan.target)
    )
    safe = before + after
    return Memory(before, after, staging, safe + staging, np.minimum(safe, _tight(plan, before, after)) + staging)


def staging_of(plan: MigrationPlan, direct_nbytes: int | None = None) -> np.ndarray:
    """The buffers of the handover, on each rank of `plan`: int64 [ranks].

    Slices of at least `direct_nbytes` need no staging at an end that has them in one run, if every shard is; by default
    all slices need it.
    """
    rank_count = len(plan.slots)
    staging = np.zeros(rank_count, dtype=np.int64)
    wire = np.flatnonzero(plan.moves.round >= 0)
    for end, held in zip(plan.ends, _lengths_held(plan, wire), strict=True):
        packed = _packed_nbytes(plan, wire, _is_one_run(plan.moves.lengths[wire], held), direct_nbytes)
        cell, where = np.unique(end[wire] * max(plan.round_count, 1) + plan.moves.round[wire], return_inverse=True)
        total = np.zeros(len(cell), dtype=np.int64)
        np.add.at(total, where, packed)
        rank, index = np.divmod(cell, max(plan.round_count, 1))
        largest = np.zeros((rank_count, STAGING_BUFFERS), dtype=np.int64)
        np.maximum.at(largest, (rank, index % STAGING_BUFFERS), total)
        staging += largest.sum(axis=1)
    return staging


def _packed_nbytes(
    plan: MigrationPlan, rows: np.ndarray, is_one_run: np.ndarray, direct_nbytes: int | None
) -> np.ndarray:
    """What the slices of each of these rows of the moves take of a staging buffer, at one end: int64."""
    numel, bundle = plan.moves.lengths[rows].prod(axis=1), plan.moves.bundle[rows]
    total = np.zeros(len(rows), dtype=np.int64)
    for itemsize in {tensor.itemsize for bundle in plan.bundles for tensor in bundle.tensors}:
        tensors = np.array([sum(t.itemsize == itemsize for t in b.tensors) for b in plan.bundles], dtype=np.int64)
        is_packed = ~(is_one_run & (numel * itemsize >= direct_nbytes)) if direct_nbytes is not None else True
        total += is_packed * tensors[bundle] * (-(-numel * itemsize // ALIGNMENT) * ALIGNMENT)
    return total


def _lengths_held(plan: MigrationPlan, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the shards that each of these rows of the moves leaves and reaches: int64 [rows, ndim] each."""
    row, is_relay = plan.moves.source_row[rows], plan.moves.is_relay[rows]
    into = plan.target.lengths[plan.moves.target_row[rows]]
    out = np.empty_like(into)
    out[is_relay], out[~is_relay] = plan.target.lengths[row[is_relay]], plan.source.lengths[row[~is_relay]]
    return out, into


def _is_one_run(lengths: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Whether boxes of `lengths` are one run of elements in shards of lengths `held` (int64 [rows, ndim] each)."""
    is_inner = np.cumsum(lengths > 1, axis=1) > (lengths > 1)
    return np.asarray(((lengths == held) | ~is_inner).all(axis=1))


def _tight(plan: MigrationPlan, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """What `phases.cut_in_phases` will need at most, where each tensor but weights is an allocation of its own.

    Weights are one allocation, which is left out while the others move where main weights can make it anew.
    """
    held, wanted = plan.source.nbytes_by_kind(), plan.target.nbytes_by_kind()
    first, last = plan.source.largest_by_kind(), plan.target.largest_by_kind()
    nothing = np.zeros_like(before)
    is_cast = "main_param" in held.keys() & wanted.keys()
    peak, left = np.maximum(before, after), before - (held.get("param", nothing) if is_cast else nothing)
    for kind in sorted(held.keys() | wanted.keys(), key=_turn):
        old, new = held.get(kind, nothing), wanted.get(kind, nothing)
        if kind == "param":
            peak = np.maximum(peak, left + new)
            left = left + new if is_cast else left + new - old
            continue
        peak = np.maximum(peak, left + last.get(kind, nothing))
        left = left + new - old
        peak = np.maximum(peak, left + first.get(kind, nothing))
    return np.maximum(peak, ((1 + SLACK) * np.maximum(before, after)).astype(np.int64))


def _turn(kind: str) -> tuple[int, str]:
    return (TIGHT_ORDER.index(kind) if kind in TIGHT_ORDER else len(TIGHT_ORDER), kind)


def choose_mode(
    plan: MigrationPlan, safe: np.ndarray, tight: np.ndarray, safe_room: np.ndarray, tight_room: np.ndarray
) -> str:
    """ "safe" where every rank's need fits into its room (bytes, int64 [ranks] each), else "tight".

    Raises DoesNotFit, of the rank that lacks most, where neither fits.
    """
    if (safe <= safe_room).all():
        return "safe"
    rank = int((tight - tight_room).argmax())
    if tight[rank] <= tight_room[rank]:
        return "tight"
    numbers = (int(each[rank]) for each in (safe, safe_room, tight, tight_room))
    raise DoesNotFit(plan.slots[rank], plan.nodes[rank], *numbers)
