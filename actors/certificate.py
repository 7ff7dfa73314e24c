"""The certificate of a handover: a checksum of each slice, taken where it left and where it arrived, and compared.

What the checksum is and what it tells is in `sums.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ray_etc.actors.errors import CertificateError
from ray_etc.actors.passes import Job, Pass
from ray_etc.actors.sums import as_integers, with_sizes

if TYPE_CHECKING:
    from ray_etc.actors.mover import MoveReport
    from ray_etc.planners.plan import MigrationPlan
    from ray_etc.planners.rank_plan import Move

NAMED_MISMATCHES = 5


def checksums(slices: Sequence[torch.Tensor]) -> np.ndarray:
    """Checksum of each slice, computed where the slices lie and fetched at once, as uint64."""
    if not slices:
        return np.empty(0, np.uint64)
    integers = [as_integers(each) for each in slices]
    sums = torch.zeros(len(slices), dtype=torch.int64, device=integers[0].device)
    Pass([Job(each, None, left=number) for number, each in enumerate(integers)], sums).run()
    return with_sizes(sums.cpu().numpy(), np.array([each.nbytes for each in integers]))


def compare(plan: MigrationPlan, reports: Iterable[MoveReport]) -> None:
    """Check that every move of the plan was carried out and that its bytes arrived as they left.

    That the moves cover every element of the new layout is `plan.check()`'s to prove. This runs in the pause: where
    all is well it only counts the moves and compares arrays.

    Args:
        plan: the whole plan.
        reports: the report of each of its ranks, in any order.

    Raises:
        CertificateError: names the first moves that failed and counts them all.
    """
    ends = _ends(plan, {report.rank: report for report in reports})
    if all(
        len(left) == len(arrived) == count and np.array_equal(left, arrived) for count, left, arrived in ends.values()
    ):
        return
    mismatches: list[str] = []
    for (index, source, destination), (_, left, arrived) in sorted(ends.items(), key=lambda item: item[0]):
        moves = [
            move
            for move in (plan.local if index < 0 else plan.rounds[index])
            if (move.src_rank, move.dst_rank) == (source, destination)
        ]
        where = "local" if index < 0 else f"round {index}"
        short = next(
            (side for side, sums in (("source", left), ("destination", arrived)) if len(sums) != len(moves)), ""
        )
        if short:
            mismatches += [f"{_describe(plan, move)}, {where}: not carried out at its {short}" for move in moves]
            continue
        failed = np.flatnonzero(left != arrived).tolist()
        mismatches += [f"{_describe(plan, moves[position])}, {where}" for position in failed]
    raise CertificateError(mismatches[:NAMED_MISMATCHES], len(mismatches))


def _ends(
    plan: MigrationPlan, reports: Mapping[int, MoveReport]
) -> dict[tuple[int, int, int], tuple[int, np.ndarray, np.ndarray]]:
    """(number of moves, sums where they left, sums where they arrived) by (round, source, destination).

    Local moves are round -1. What no report tells is empty.
    """
    nothing = np.empty(0, np.uint64)
    ends = {}
    for (index, source, destination), count in plan.message_sizes().items():
        sender, receiver = reports.get(source), reports.get(destination)
        if index < 0:
            left, arrived = (sender.local_left, sender.local_arrived) if sender else (nothing, nothing)
        else:
            left = sender.sent.get((index, destination), nothing) if sender else nothing
            arrived = receiver.received.get((index, source), nothing) if receiver else nothing
        ends[index, source, destination] = (count, left, arrived)
    return ends


def _describe(plan: MigrationPlan, move: Move) -> str:
    tensor = plan.target[move.dst_rank][move.dst_shard].tensor
    box = ", ".join(f"{start}:{start + n}" for start, n in zip(move.box.offsets, move.box.lengths, strict=True))
    return f"{tensor.kind} {tensor.name}[{box}] from rank {move.src_rank} to rank {move.dst_rank}"
