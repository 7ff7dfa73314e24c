"""The processes of `benchmarks.transport`: what each is asked to do and to time."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch

from benchmarks.timing import least_s, synchronize
from ray_etc.actors import sharing
from ray_etc.actors.certificate import checksums
from ray_etc.actors.errors import TransportError
from ray_etc.actors.mover import Mover, MoveReport
from ray_etc.actors.transports import close_group, get_group, open_group
from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import RankLayout, Shard
from ray_etc.planners.rank_plan import RankPlan

MIB = 1 << 20


class Process:
    """What every process of the benchmark has: a device, and memory that another process can map."""

    def __init__(self, use_cpu: bool) -> None:
        self.device = torch.device("cpu" if use_cpu else "cuda:0")
        self.views: list[torch.Tensor] = []

    def pid(self) -> int:
        return os.getpid()

    def fill(self, nbytes: int, count: int) -> sharing.SharedMemory:
        buffer = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=self.device)
        self.views = list(buffer.view(count, -1).unbind(0))
        synchronize(self.device)
        return sharing.share(self.views)

    def map(self, shared: sharing.SharedMemory) -> float:
        start = time.perf_counter()
        self.views = sharing.open(shared)
        return time.perf_counter() - start

    def copy_out(self) -> dict[str, Any]:
        target = [torch.empty_like(view) for view in self.views]
        seconds = least_s(lambda: [t.copy_(view) for t, view in zip(target, self.views, strict=True)], self.device, 4)
        nbytes = sum(view.numel() for view in self.views)
        same = (checksums(target) == checksums(self.views)).all()
        return {"gb_per_s": nbytes / seconds / 1e9, "same": bool(same)}

    def sums(self) -> list[int]:
        return [int(each) for each in checksums(self.views)]

    def unmap(self) -> None:
        self.views = []


class Rank(Process):
    """A member of the group."""

    def open(self, group: str, rank: int, world_size: int) -> bytes | None:
        backend = "ETC_GLOO" if self.device.type == "cpu" else "ETC_NCCL"
        transport = open_group(backend, group, rank, world_size)
        return transport.rendezvous() if rank == 0 else None

    def connect(self, group: str, rendezvous: bytes) -> float:
        start = time.perf_counter()
        get_group(group).connect(rendezvous, 60.0)
        return time.perf_counter() - start

    def close(self, group: str) -> None:
        close_group(group)

    def migrate(self, group: str, plan: RankPlan, source: RankLayout, target: RankLayout) -> tuple[MoveReport, bool]:
        """Carry out this rank's part; whether every byte, by position, is that of the logical tensor."""
        targets = [torch.zeros(shard.box.lengths, dtype=_dtype(shard), device=self.device) for shard in target]
        sources = [self._part(shard) for shard in source]
        mover = Mover(plan, get_group(group), sources, source, targets, target, self.device)
        mover.prepare()
        for _ in range(2):  # the first loads modules
            report = mover.run(60.0)
        good = all(
            torch.equal(view.view(torch.uint8), self._part(shard).view(torch.uint8))
            for view, shard in zip(targets, target, strict=True)
        )
        return report, good

    def large_message(self, group: str, nbytes: int) -> float:
        """GB/s each way of one message to the partner and one from it."""
        transport, peer = get_group(group), get_group(group).rank ^ 1
        out = torch.ones(nbytes, dtype=torch.uint8, device=self.device)
        into = torch.empty_like(out)
        seconds = least_s(lambda: transport.exchange({peer: out}, {peer: into}, 60.0), self.device, 4)
        return nbytes / seconds / 1e9

    def slices(self, group: str, count: int, nbytes: int, is_packed: bool) -> float:
        """GB/s each way of `count` strided slices of `nbytes`: packed into one message, or one message each."""
        transport, peer = get_group(group), get_group(group).rank ^ 1
        source = torch.ones(count, 2 * nbytes, dtype=torch.uint8, device=self.device)[:, :nbytes]
        target = torch.empty(count, 2 * nbytes, dtype=torch.uint8, device=self.device)[:, :nbytes]
        out, into = (torch.empty(count, nbytes, dtype=torch.uint8, device=self.device) for _ in range(2))

        def packed() -> None:
            out.copy_(source)
            transport.exchange({peer: out.view(-1)}, {peer: into.view(-1)}, 60.0)
            target.copy_(into)

        def one_by_one() -> None:
            for row_out, row_into in zip(source, target, strict=True):
                transport.exchange({peer: row_out}, {peer: row_into}, 60.0)

        return count * nbytes / least_s(packed if is_packed else one_by_one, self.device, 3) / 1e9

    def wait_for_silent(self, group: str, timeout_s: float, abort_after_s: float | None = None) -> dict[str, Any]:
        """Receive from a peer that sends nothing: what comes of it, and whether this process is still of use."""
        transport = get_group(group)
        peer = transport.world_size - 1
        if abort_after_s is not None:
            threading.Timer(abort_after_s, transport.abort).start()
        start = time.perf_counter()
        try:
            transport.exchange({}, {peer: torch.empty(64 * MIB, dtype=torch.uint8, device=self.device)}, timeout_s)
            error = "none"
        except TransportError as caught:
            error = f"{type(caught).__name__}: {caught}"
        seconds = time.perf_counter() - start
        product = torch.randn(512, 512, device=self.device) @ torch.randn(512, 512, device=self.device)
        synchronize(self.device)
        return {"seconds": seconds, "error": error, "device_usable": bool(torch.isfinite(product).all())}

    def _part(self, shard: Shard) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(map(ord, shard.tensor.kind + shard.tensor.name)))
        rows, *rest = shard.tensor.shape
        octets = torch.randint(
            0, 256, (rows, *rest[:-1], rest[-1] * shard.tensor.itemsize), dtype=torch.uint8, generator=generator
        )
        whole = octets.view(_dtype(shard))
        return whole[shard.box.slices_in(Box.whole(shard.tensor.shape))].to(self.device).contiguous()


def _dtype(shard: Shard) -> torch.dtype:
    return getattr(torch, shard.tensor.dtype)
