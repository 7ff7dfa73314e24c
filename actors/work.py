"""One rank's part of a plan as work on memory: passes that copy and sum, and the buffers that travel in each round.

A message to a peer is its small slices packed in one buffer, then each large slice in a buffer of its own. A large
slice that lies in one run goes straight from its view, or into it; at an end where it does not, it is packed too. Both
ends cut a message alike, because a slice is large by its size alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ray_etc.actors.passes import Job, Pass, load
from ray_etc.actors.sums import with_sizes
from ray_etc.planners.rank_plan import Move, RankPlan

ALIGNMENT = 16
"""Each packed slice starts at a multiple of this many bytes, so that its buffer can be viewed as any type."""

PACK_SHARE = 0.16
SIDE_SHARE = 0.2
"""Of a GPU's processors while messages travel: for packing, as much again for unpacking, and for local copies. Seen on
2 H200: with half as much for packing the wire waits for it; with twice as much for either NCCL's kernels are slowed, by
a tenth for local copies at 0.42. What of them is left when the last message is there gets the whole GPU."""
CHECK_SHARE = 0.1
"""For summing what leaves or arrives without being packed."""

ByPeer = Mapping[int, Sequence[Move]]
Messages = dict[int, list[torch.Tensor]]
"""Flat uint8 buffers by peer, in the order in which both ends send and receive them."""


@dataclass(frozen=True)
class Round:
    """What one round does here. `check` sums what leaves unpacked, and what arrived unless that was read back."""

    pack: Pass
    sends: Messages
    receives: Messages
    unpack: Pass
    check: Pass
    has_relays: bool


@dataclass(frozen=True, slots=True)
class Parcel:
    """A slice on its way: the view that it leaves or enters, and where it is packed; None where it goes straight."""

    view: torch.Tensor
    packed: torch.Tensor | None
    number: int


class Work:
    """Everything that a rank does in a handover, ready to be started.

    Args:
        plan: this rank's part.
        source_of: the slice that a move reads, as integers; asked only of moves that this rank reads.
        target_of: the slice that a move writes, likewise.
        device: where messages are packed.
        direct_nbytes: slices of at least this size are large; None where none is.
        buffer_count: staging buffers each way; round i uses number i modulo this.
        reads_back: sum what arrived by reading back each piece as it is written, where it is copied; else afterwards.
    """

    def __init__(
        self,
        plan: RankPlan,
        source_of: Callable[[Move], torch.Tensor],
        target_of: Callable[[Move], torch.Tensor],
        device: torch.device,
        direct_nbytes: int | None,
        buffer_count: int,
        reads_back: bool,
    ) -> None:
        self._source_of, self._target_of, self._direct_nbytes = source_of, target_of, direct_nbytes
        self._reads_back = reads_back
        self._numbers: dict[tuple[str, int, int], slice] = {}
        self._nbytes = self._number(plan)
        # The last number is the ticket of the local copies: it starts at 0 with the sums.
        self.sums = torch.zeros(len(self._nbytes) + 1, dtype=torch.int64, device=device)

        def buffers(sides: Sequence[ByPeer], view_of: Callable[[Move], torch.Tensor]) -> list[torch.Tensor]:
            sizes = [self._packed_nbytes(side, view_of) for side in sides]
            return [
                torch.empty(max(sizes[first::buffer_count], default=0), dtype=torch.uint8, device=device)
                for first in range(buffer_count)
            ]

        out = buffers([messages.sends for messages in plan.rounds], source_of)
        into = buffers([messages.receives for messages in plan.rounds], target_of)
        self.staging_nbytes = sum(buffer.numel() for buffer in (*out, *into))
        left, arrived = (self._numbers[end, -1, plan.rank] for end in ("left", "arrived"))
        copies, checks = self._writing(
            [
                (source_of(move), target_of(move), left.start + number, arrived.start + number)
                for number, move in enumerate(plan.local)
            ]
        )
        if plan.rounds:
            self.local = Pass(copies, self.sums, SIDE_SHARE, ticket=self.sums[-1:])
        else:
            self.local = Pass(copies, self.sums)
        self.local_arrived = Pass(checks, self.sums)
        self.rounds = [
            self._round(index, len(plan.rounds), messages.sends, messages.receives, out[slot], into[slot])
            for index, messages in enumerate(plan.rounds)
            for slot in [index % buffer_count]
        ]
        load(
            [
                *(self.local, self.local_arrived),
                *(part for each in self.rounds for part in (each.pack, each.unpack, each.check)),
            ]
        )

    def fetch_sums(self) -> dict[tuple[str, int, int], np.ndarray]:
        """The checksum of each slice as uint64, in the order of the plan, by ("left" or "arrived", round, peer).

        Local moves are round -1 with this rank as peer. Waits for the current stream.
        """
        sums = with_sizes(self.sums[:-1].cpu().numpy(), self._nbytes)
        return {key: sums[part] for key, part in self._numbers.items()}

    def _number(self, plan: RankPlan) -> np.ndarray:
        """Give every slice the number of its sum; returns their sizes in bytes."""
        parts = [("left", -1, plan.rank, plan.local), ("arrived", -1, plan.rank, plan.local)]
        for index, messages in enumerate(plan.rounds):
            parts += [("left", index, peer, moves) for peer, moves in messages.sends.items()]
            parts += [("arrived", index, peer, moves) for peer, moves in messages.receives.items()]
        sizes: list[int] = []
        for end, index, peer, moves in parts:
            self._numbers[end, index, peer] = slice(len(sizes), len(sizes) + len(moves))
            sizes.extend(move.nbytes for move in moves)
        return np.array(sizes, dtype=np.int64)

    def _round(
        self, index: int, count: int, sends: ByPeer, receives: ByPeer, out: torch.Tensor, into: torch.Tensor
    ) -> Round:
        outgoing, leaving = self._lay("left", index, sends, self._source_of, out)
        incoming, arriving = self._lay("arrived", index, receives, self._target_of, into)
        # Nothing is on the wire before the first round is packed, nor when the last is unpacked: those have the GPU.
        pack_share = 1.0 if index == 0 else PACK_SHARE
        unpack_share = 1.0 if index == count - 1 else PACK_SHARE
        packing = [Job(each.view, each.packed, left=each.number) for each in leaving if each.packed is not None]
        direct = [Job(None, each.view, arrived=each.number) for each in leaving if each.packed is None]
        unpacking, checks = self._writing([(each.packed, each.view, None, each.number) for each in arriving])
        return Round(
            pack=Pass(packing, self.sums, pack_share),
            sends=outgoing,
            receives=incoming,
            unpack=Pass(unpacking, self.sums, unpack_share),
            check=Pass(direct + checks, self.sums, CHECK_SHARE),
            has_relays=any(move.is_relay for moves in sends.values() for move in moves),
        )

    def _writing(
        self, parts: Iterable[tuple[torch.Tensor | None, torch.Tensor, int | None, int]]
    ) -> tuple[list[Job], list[Job]]:
        """Jobs that copy (source, target, number where it left, number where it arrived), and those that sum after."""
        copies, checks = [], []
        for source, target, left, arrived in parts:
            if source is not None:
                copies.append(Job(source, target, left, arrived if self._reads_back else None))
            if source is None or not self._reads_back:
                checks.append(Job(None, target, arrived=arrived))
        return copies, checks

    def _lay(
        self, end: str, index: int, by_peer: ByPeer, view_of: Callable[[Move], torch.Tensor], staging: torch.Tensor
    ) -> tuple[Messages, list[Parcel]]:
        """The messages of one end of a round, side by side in the staging buffer, and what they hold."""
        messages: Messages = {}
        parcels: list[Parcel] = []
        start = 0
        for peer, moves in by_peer.items():
            first = self._numbers[end, index, peer].start
            messages[peer] = []
            for group in self._groups(moves):
                views = [view_of(moves[position]) for position in group]
                if self._goes_straight(moves[group[0]], views[0]):
                    messages[peer].append(_as_bytes(views[0]))
                    parcels.append(Parcel(views[0], None, first + group[0]))
                    continue
                stop = start
                for position, view in zip(group, views, strict=True):
                    nbytes = moves[position].nbytes
                    packed = staging[stop : stop + nbytes].view(view.dtype).view(view.shape)
                    parcels.append(Parcel(view, packed, first + position))
                    stop += aligned(nbytes)
                # The other end of a large slice may have no room behind it.
                end_of_message = start + moves[group[0]].nbytes if self._is_large(moves[group[0]]) else stop
                messages[peer].append(staging[start:end_of_message])
                start = stop
        return messages, parcels

    def _groups(self, moves: Sequence[Move]) -> Iterator[list[int]]:
        """Positions of the moves that share a buffer: all small ones, then each large one."""
        small = [position for position, move in enumerate(moves) if not self._is_large(move)]
        if small:
            yield small
        yield from ([position] for position, move in enumerate(moves) if self._is_large(move))

    def _packed_nbytes(self, by_peer: ByPeer, view_of: Callable[[Move], torch.Tensor]) -> int:
        return sum(
            aligned(move.nbytes)
            for moves in by_peer.values()
            for move in moves
            if not self._goes_straight(move, view_of(move))
        )

    def _goes_straight(self, move: Move, view: torch.Tensor) -> bool:
        return self._is_large(move) and view.is_contiguous()

    def _is_large(self, move: Move) -> bool:
        return self._direct_nbytes is not None and move.nbytes >= self._direct_nbytes


def _as_bytes(view: torch.Tensor) -> torch.Tensor:
    """A contiguous view as flat uint8; one of a single element may have any strides."""
    return view.as_strided((view.numel(),), (1,)).view(torch.uint8)


def aligned(nbytes: int) -> int:
    """The bytes that a packed slice takes of a staging buffer."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
