"""Carries out one rank's part of a plan: copies what is here, exchanges the rest in rounds, and sums both sides."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ray_etc.actors.certificate import as_integers, checksums
from ray_etc.actors.transports.base import Deadline, Transport
from ray_etc.planners.layout import RankLayout
from ray_etc.planners.plan import Move, RankPlan

ALIGNMENT = 16
"""Each slice of a message starts at a multiple of this many bytes, so that a buffer can be viewed as any type."""


@dataclass(frozen=True)
class MoveReport:
    """What one rank did: times, bytes, and the checksum of every slice that left or arrived here.

    Checksums are in the order of the moves in the `RankPlan`; `sent` and `received` are keyed by (round, peer), so
    that both ends of a message name it alike.
    """

    rank: int
    local_s: float
    wire_s: float
    certify_s: float
    nbytes_local: int
    nbytes_sent: int
    nbytes_received: int
    local_left: np.ndarray
    local_arrived: np.ndarray
    sent: Mapping[tuple[int, int], np.ndarray]
    received: Mapping[tuple[int, int], np.ndarray]


class Mover:
    """One rank's part in a handover.

    Args:
        rank_plan: what to do.
        transport: a connected group whose members are the plan's ranks; None where nothing goes over the wire.
        source_views: the memory of this slot's old shards, mapped from the old process or its own; may be empty.
        source_layout: what they hold, in the same order.
        target_views: the memory of this slot's new shards; empty on a slot that is leaving.
        target_layout: what they hold, in the same order.
        device: where messages are packed; by default where the views lie, so needed only on a rank without any.
    """

    def __init__(
        self,
        rank_plan: RankPlan,
        transport: Transport | None,
        source_views: Sequence[torch.Tensor],
        source_layout: RankLayout,
        target_views: Sequence[torch.Tensor],
        target_layout: RankLayout,
        device: torch.device | str | None = None,
    ) -> None:
        if transport is None and any(messages.sends or messages.receives for messages in rank_plan.rounds):
            raise ValueError(f"rank {rank_plan.rank}: the plan has messages, but there is no transport")
        for side, views, layout in (("source", source_views, source_layout), ("target", target_views, target_layout)):
            _check_views(f"rank {rank_plan.rank}, {side}", views, layout)
        self.plan = rank_plan
        self.transport = transport
        self.device = torch.device(device) if device is not None else _device_of(target_views, source_views)
        self._source = [as_integers(view) for view in source_views]
        self._source_layout = source_layout
        self._target = [as_integers(view) for view in target_views]
        self._target_layout = target_layout
        self._send_buffer: torch.Tensor | None = None
        self._receive_buffer: torch.Tensor | None = None

    def prepare(self) -> int:
        """Allocate the staging buffers, for the largest round; returns their size in bytes."""
        sizes = [
            (_nbytes_of_messages(messages.sends), _nbytes_of_messages(messages.receives))
            for messages in self.plan.rounds
        ]
        nbytes_send, nbytes_receive = (max((size[i] for size in sizes), default=0) for i in (0, 1))
        self._send_buffer = torch.empty(nbytes_send, dtype=torch.uint8, device=self.device)
        self._receive_buffer = torch.empty(nbytes_receive, dtype=torch.uint8, device=self.device)
        # The certificate's weights and, on GPUs, its kernels: made now, while the old generation still trains.
        checksums([torch.zeros(1, device=self.device)])
        return nbytes_send + nbytes_receive

    def run(self, timeout_s: float, on_event: Callable[[str], None] = lambda event: None) -> MoveReport:
        """Move everything; the source stays as it is.

        Args:
            timeout_s: for all of it.
            on_event: told of each stage as it is reached: "local:done", then for each round i "round:i:packed",
                "round:i:received" and "round:i:unpacked", then "moved" and "certified". Tests script faults with it.

        Raises:
            TransportError: the target is then of no use; the source is untouched.
        """
        if self._send_buffer is None:
            self.prepare()
        deadline = Deadline(timeout_s)
        start = self._now()
        for move in self.plan.local:
            self._target_slice(move).copy_(self._source_slice(move))
        local_end = self._now()
        on_event("local:done")
        for index in range(len(self.plan.rounds)):
            self._run_round(index, deadline, on_event)
        wire_end = self._now()
        on_event("moved")
        local_left = checksums([self._source_slice(move) for move in self.plan.local])
        local_arrived = checksums([self._target_slice(move) for move in self.plan.local])
        sent, received = self._wire_checksums()
        report = MoveReport(
            rank=self.plan.rank,
            local_s=local_end - start,
            wire_s=wire_end - local_end,
            certify_s=self._now() - wire_end,
            nbytes_local=sum(move.nbytes for move in self.plan.local),
            nbytes_sent=_nbytes(messages.sends for messages in self.plan.rounds),
            nbytes_received=_nbytes(messages.receives for messages in self.plan.rounds),
            local_left=local_left,
            local_arrived=local_arrived,
            sent=sent,
            received=received,
        )
        on_event("certified")
        return report

    def close(self) -> None:
        """Let go of the views and the staging buffers, so that mapped memory is unmapped with its last reference."""
        self._source, self._target = [], []
        self._send_buffer = self._receive_buffer = None

    def _run_round(self, index: int, deadline: Deadline, on_event: Callable[[str], None]) -> None:
        assert self._send_buffer is not None
        assert self._receive_buffer is not None
        messages = self.plan.rounds[index]
        sends = _cut(self._send_buffer, messages.sends)
        receives = _cut(self._receive_buffer, messages.receives)
        for peer, moves in messages.sends.items():
            for move, packed in _unpacked(sends[peer], moves):
                part = self._source_slice(move)
                packed.view(part.dtype).view(part.shape).copy_(part)
        on_event(f"round:{index}:packed")
        if self.transport is not None:
            self.transport.exchange(sends, receives, deadline.left_s())
        on_event(f"round:{index}:received")
        for peer, moves in messages.receives.items():
            for move, packed in _unpacked(receives[peer], moves):
                part = self._target_slice(move)
                part.copy_(packed.view(part.dtype).view(part.shape))
        on_event(f"round:{index}:unpacked")

    def _wire_checksums(self) -> tuple[dict[tuple[int, int], np.ndarray], dict[tuple[int, int], np.ndarray]]:
        sent: dict[tuple[int, int], np.ndarray] = {}
        received: dict[tuple[int, int], np.ndarray] = {}
        for index, messages in enumerate(self.plan.rounds):
            for peer, moves in messages.sends.items():
                sent[index, peer] = checksums([self._source_slice(move) for move in moves])
            for peer, moves in messages.receives.items():
                received[index, peer] = checksums([self._target_slice(move) for move in moves])
        return sent, received

    def _source_slice(self, move: Move) -> torch.Tensor:
        return self._source[move.src_shard][move.box.slices_in(self._source_layout[move.src_shard].box)]

    def _target_slice(self, move: Move) -> torch.Tensor:
        return self._target[move.dst_shard][move.box.slices_in(self._target_layout[move.dst_shard].box)]

    def _now(self) -> float:
        """Time by which everything asked of the device is done."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter()


def _device_of(*sides: Sequence[torch.Tensor]) -> torch.device:
    return next((view.device for views in sides for view in views), torch.device("cpu"))


def _check_views(who: str, views: Sequence[torch.Tensor], layout: RankLayout) -> None:
    if len(views) != len(layout):
        raise ValueError(f"{who}: {len(views)} views for a layout of {len(layout)} shards")
    for view, shard in zip(views, layout, strict=True):
        if tuple(view.shape) != shard.box.lengths or view.element_size() != shard.tensor.itemsize:
            raise ValueError(
                f"{who}: {shard.tensor.key} is a view of shape {tuple(view.shape)} and {view.element_size()} bytes "
                f"an element, its layout says {shard.box.lengths} and {shard.tensor.itemsize}"
            )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _nbytes(messages: Iterable[Mapping[int, tuple[Move, ...]]]) -> int:
    return sum(move.nbytes for by_peer in messages for moves in by_peer.values() for move in moves)


def _nbytes_of_messages(by_peer: Mapping[int, tuple[Move, ...]]) -> int:
    return sum(_aligned(move.nbytes) for moves in by_peer.values() for move in moves)


def _cut(buffer: torch.Tensor, by_peer: Mapping[int, tuple[Move, ...]]) -> dict[int, torch.Tensor]:
    """One message a peer, side by side in the staging buffer."""
    messages, start = {}, 0
    for peer, moves in by_peer.items():
        stop = start + sum(_aligned(move.nbytes) for move in moves)
        messages[peer] = buffer[start:stop]
        start = stop
    return messages


def _unpacked(message: torch.Tensor, moves: Sequence[Move]) -> Iterator[tuple[Move, torch.Tensor]]:
    """Where in a message each move lies. Both ends compute it from the same moves in the same order."""
    start = 0
    for move in moves:
        yield move, message[start : start + move.nbytes]
        start += _aligned(move.nbytes)
