"""Carries out one rank's part of a plan: copies what is here, exchanges the rest in rounds, and sums both sides."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ray_etc.actors.pipeline import BUFFERS, Pipeline, Times
from ray_etc.actors.sums import as_integers
from ray_etc.actors.transports.base import Deadline, Transport
from ray_etc.actors.transports.nccl import NcclTransport
from ray_etc.actors.work import Work
from ray_etc.planners.layout import RankLayout
from ray_etc.planners.rank_plan import Move, RankPlan

DIRECT_NBYTES = 512 * 2**20
"""Slices of at least this size go without packing: NCCL carried smaller messages at 0.65 to 0.85 of its best rate."""


@dataclass(frozen=True)
class MoveReport:
    """What one rank did: times, bytes, and the checksum of every slice that left or arrived here.

    On CPUs each time begins where the one before it ends. On GPUs the work overlaps: `local_s` and `wire_s` both count
    from the start, until the local copies and until the last round was in place; `certify_s` is what came after both.

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
        direct_nbytes: on GPUs, slices of at least this size go without packing; the same on all ranks of the plan.
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
        direct_nbytes: int = DIRECT_NBYTES,
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
        self._direct_nbytes = direct_nbytes
        self._work: Work | None = None
        self._pipeline: Pipeline | None = None

    def prepare(self) -> int:
        """Describe all work, compile its kernels and allocate the staging buffers; returns their size in bytes."""
        on_gpu = self.device.type == "cuda"
        self._work = Work(
            self.plan,
            self._source_slice,
            self._target_slice,
            self.device,
            self._direct_nbytes if on_gpu else None,
            BUFFERS if on_gpu else 1,
            reads_back=on_gpu,
        )
        if on_gpu:
            assert self.transport is None or isinstance(self.transport, NcclTransport)
            self._pipeline = Pipeline(self._work, self.transport, self.device)
            # Only this stream: in a rank that is stuck in a collective of a dead peer, others never get there.
            torch.cuda.current_stream(self.device).synchronize()
        return self._work.staging_nbytes

    def run(self, timeout_s: float, on_event: Callable[[str], None] = lambda event: None) -> MoveReport:
        """Move everything; the source stays as it is.

        Args:
            timeout_s: for all of it.
            on_event: told of each stage as it is reached: "local:done", then for each round i "round:i:packed",
                "round:i:received" and "round:i:unpacked", then "moved" and "certified". Tests script faults with it.
                On GPUs a stage is told when it is enqueued, with its stream as torch's current one, so that a round is
                packed before the last is unpacked, and each piece of the target is read back and summed as it is
                written. On CPUs the target is summed after "moved".

        Raises:
            TransportError: the target is then of no use; the source is untouched.
        """
        if self._work is None:
            self.prepare()
        assert self._work is not None
        deadline = Deadline(timeout_s)
        if self._pipeline is not None:
            times = self._pipeline.run(deadline, on_event)
        else:
            times = self._run_on_host(self._work, deadline, on_event)
        sums = self._work.fetch_sums()
        own = (-1, self.plan.rank)
        ends: dict[str, dict[tuple[int, int], np.ndarray]] = {"left": {}, "arrived": {}}
        for (end, index, peer), part in sums.items():
            ends[end][index, peer] = part
        report = MoveReport(
            rank=self.plan.rank,
            local_s=times.local_s,
            wire_s=times.wire_s,
            certify_s=times.certify_s,
            nbytes_local=sum(move.nbytes for move in self.plan.local),
            nbytes_sent=_nbytes(messages.sends for messages in self.plan.rounds),
            nbytes_received=_nbytes(messages.receives for messages in self.plan.rounds),
            local_left=ends["left"].pop(own),
            local_arrived=ends["arrived"].pop(own),
            sent=ends["left"],
            received=ends["arrived"],
        )
        on_event("certified")
        return report

    def close(self) -> None:
        """Let go of the views and the staging buffers, so that mapped memory is unmapped with its last reference."""
        self._source, self._target = [], []
        self._work = self._pipeline = None

    def _run_on_host(self, work: Work, deadline: Deadline, on_event: Callable[[str], None]) -> Times:
        """One stage after the other. A round that relays packs what earlier rounds have unpacked."""
        work.sums.zero_()
        start = time.perf_counter()
        work.local.run()
        local_end = time.perf_counter()
        on_event("local:done")
        for index, each in enumerate(work.rounds):
            each.pack.run()
            on_event(f"round:{index}:packed")
            if self.transport is not None:
                sends, receives = (
                    {peer: buffer for peer, buffers in side.items() for buffer in buffers}
                    for side in (each.sends, each.receives)
                )
                self.transport.exchange(sends, receives, deadline.left_s())
            on_event(f"round:{index}:received")
            each.unpack.run()
            on_event(f"round:{index}:unpacked")
        wire_end = time.perf_counter()
        on_event("moved")
        work.local_arrived.run()
        for each in work.rounds:
            each.check.run()
        return Times(local_end - start, wire_end - local_end, time.perf_counter() - wire_end)

    def _source_slice(self, move: Move) -> torch.Tensor:
        if move.is_relay:  # what an earlier round brought here
            return self._target[move.src_shard][move.box.slices_in(self._target_layout[move.src_shard].box)]
        return self._source[move.src_shard][move.box.slices_in(self._source_layout[move.src_shard].box)]

    def _target_slice(self, move: Move) -> torch.Tensor:
        return self._target[move.dst_shard][move.box.slices_in(self._target_layout[move.dst_shard].box)]


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


def _nbytes(messages: Iterable[Mapping[int, tuple[Move, ...]]]) -> int:
    return sum(move.nbytes for by_peer in messages for moves in by_peer.values() for move in moves)
