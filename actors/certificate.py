"""The certificate of a handover: a checksum of each slice, by position, taken where it left and where it arrived.

The sum of an element times an odd weight of its position, modulo 2**64. One changed bit always changes it, because an
odd weight has no zero divisors there; so does a swap of two different elements, but for one chance in 2**32 at worst.
Positions are those of the slice in row-major order, whatever the strides of the memory, so both sides agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from ray_etc.actors.errors import CertificateError
from ray_etc.planners.plan import MigrationPlan, Move

if TYPE_CHECKING:
    from ray_etc.actors.mover import MoveReport

PIECE = 1 << 21
"""Words of at most 32 bits summed at a time: 16 MiB of weights, kept, and as much for products. The sums depend on it,
so it is one number for all ranks."""

NAMED_MISMATCHES = 5
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
U64 = (1 << 64) - 1
PIECE_SALT = 1 << 32
"""Sets the factors of the pieces apart from the weights within a piece: one sequence for both would be symmetric, and
the element i of piece k would weigh as much as the element k of piece i."""


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width: copied and summed bit by bit, whatever the type.

    A complex tensor gets one more dim, of length 2.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(INTEGERS[tensor.element_size()])


def checksums(slices: Sequence[torch.Tensor]) -> np.ndarray:
    """Checksum of each slice, computed where the slices lie and fetched at once, as uint64."""
    if not slices:
        return np.empty(0, np.uint64)
    return torch.stack([_checksum(each) for each in slices]).cpu().numpy().view(np.uint64)


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    integers = as_integers(tensor)
    halves = 2 if integers.element_size() == 8 else 1
    # The number of elements tells a slice of zeros from one that is missing or of another size.
    total = torch.full((), _signed(_mix(integers.numel())), dtype=torch.int64, device=tensor.device)
    weights = _weights(str(tensor.device))
    for index, piece in enumerate(_pieces(integers, PIECE // halves)):
        words, count = piece.reshape(-1), piece.numel()
        if halves == 2:
            # Words of 32 bits at most: two 64-bit elements that differ in their sign bit only could otherwise swap.
            upper = ((words >> 32) * weights[count : 2 * count]).sum()
            part = upper + ((words & 0xFFFFFFFF) * weights[:count]).sum()
        else:
            part = (words * weights[:count]).sum()
        total = total + part * _signed(_mix(PIECE_SALT + index) | 1)
    return total


def _pieces(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Parts of at most `limit` elements, in row-major order. How it is cut depends on the shape alone."""
    if tensor.numel() <= limit:
        if tensor.numel():
            yield tensor
        return
    rows = max(1, limit // (tensor.numel() // tensor.shape[0]))
    for start in range(0, tensor.shape[0], rows):
        part = tensor[start : start + rows]
        yield from _pieces(part[0], limit) if part.numel() > limit else (part,)


@lru_cache(maxsize=8)
def _weights(device: str) -> torch.Tensor:
    words = np.arange(1, PIECE + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words = (words ^ (words >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(words.view(np.int64)).to(device)


def _mix(number: int) -> int:
    """splitmix64 (Steele, Lea and Flood, 2014): a fixed, well-spread 64-bit value of a small number."""
    number = (number + 1) * 0x9E3779B97F4A7C15 & U64
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & U64
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & U64
    return number ^ (number >> 31)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def compare(plan: MigrationPlan, reports: Iterable[MoveReport]) -> None:
    """Check that every move of the plan was carried out and that its bytes arrived as they left.

    That the moves cover every element of the new layout is `plan.check()`'s to prove.

    Args:
        plan: the whole plan.
        reports: the report of each of its ranks, in any order.

    Raises:
        CertificateError: names the first moves that failed and counts them all.
    """
    by_rank = {report.rank: report for report in reports}
    mismatches: list[str] = []
    nothing = np.empty(0, np.uint64)

    def check(moves: Sequence[Move], left: np.ndarray, arrived: np.ndarray, where: str) -> None:
        for side, sums in (("source", left), ("destination", arrived)):
            if len(sums) != len(moves):
                for move in moves:
                    mismatches.append(f"{_describe(plan, move)}, {where}: not carried out at its {side}")
                return
        for position in np.flatnonzero(left != arrived).tolist():
            mismatches.append(f"{_describe(plan, moves[position])}, {where}")

    for rank in range(len(plan.slots)):
        part, report = plan.for_rank(rank), by_rank.get(rank)
        check(
            part.local,
            report.local_left if report else nothing,
            report.local_arrived if report else nothing,
            "local",
        )
        for index, messages in enumerate(part.rounds):
            for peer, moves in messages.receives.items():
                sender = by_rank.get(peer)
                left = sender.sent.get((index, rank), nothing) if sender else nothing
                arrived = report.received.get((index, peer), nothing) if report else nothing
                check(moves, left, arrived, f"round {index}")
    if mismatches:
        raise CertificateError(mismatches[:NAMED_MISMATCHES], len(mismatches))


def _describe(plan: MigrationPlan, move: Move) -> str:
    tensor = plan.target[move.dst_rank][move.dst_shard].tensor
    box = ", ".join(f"{start}:{start + n}" for start, n in zip(move.box.offsets, move.box.lengths, strict=True))
    return f"{tensor.kind} {tensor.name}[{box}] from rank {move.src_rank} to rank {move.dst_rank}"
