"""The processes of `benchmarks.handover`: state with known bytes, one generation beside the other on each GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.timing import least_s, synchronize
from ray_etc.actors import sharing
from ray_etc.actors.mover import Mover, MoveReport
from ray_etc.actors.sums import as_integers
from ray_etc.actors.transports import GlooTransport, NcclTransport, Transport
from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import RankLayout, Shard, TensorSpec
from ray_etc.planners.rank_plan import Move, RankPlan

MIB = 1 << 20
MOVE_S = 60.0
ALIGNMENT = 128
CHUNK_NUMEL = 1 << 26


class Rank:
    """One process on one GPU, of the old generation or of the new."""

    def __init__(self, gpu: int | None) -> None:
        self.device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        if gpu is not None:
            torch.cuda.set_device(gpu)
            torch.zeros(1, device=self.device)
        self._buffers: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = []
        self._layout: RankLayout = ()
        self._mapped: list[torch.Tensor] = []
        self._group: Transport | None = None
        self._mover: Mover | None = None
        self._trainer: Trainer | None = None

    def ready(self) -> None:
        """Answers once the process is there."""

    # State -----------------------------------------------------------------------------------------------------------

    def hold(self, layout: RankLayout, is_filled: bool) -> sharing.SharedMemory:
        """Make memory for `layout`, one buffer a kind; fill it with the tensors' bytes, or with others."""
        self._layout = layout
        by_kind: dict[str, list[int]] = {}
        for position, shard in enumerate(layout):
            by_kind.setdefault(shard.tensor.kind, []).append(position)
        views: list[Any] = [None] * len(layout)
        for positions in by_kind.values():
            sizes = [-(-layout[position].nbytes // ALIGNMENT) * ALIGNMENT for position in positions]
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            self._buffers.append(buffer)
            start = 0
            for position, size in zip(positions, sizes, strict=True):
                views[position] = typed(buffer[start : start + layout[position].nbytes], layout[position])
                start += size
        self._views = views
        if is_filled:
            for view, shard in zip(views, layout, strict=True):
                for part, expected in with_truth(view, shard):
                    part.copy_(expected)
        else:
            self.spoil()
        synchronize(self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        return sharing.share(self._views)

    def is_right(self) -> bool:
        """Whether every byte held is that of its place in the logical tensor."""
        return all(
            torch.equal(part, expected)
            for view, shard in zip(self._views, self._layout, strict=True)
            for part, expected in with_truth(view, shard)
        )

    def spoil(self) -> None:
        """Overwrite everything, so that the next move has all to do again."""
        for buffer in self._buffers:
            buffer.fill_(255)
        synchronize(self.device)

    def peak_nbytes(self) -> int:
        """The most that torch's allocator gave this process since `hold`, its state included."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    # Handover, in the order of actors/handover.py ---------------------------------------------------------------------

    def open(self, group: str, rank: int, world_size: int) -> bytes | None:
        kind = GlooTransport if self.device.type == "cpu" else NcclTransport
        self._group = kind(world_size, rank, group)
        return self._group.rendezvous("127.0.0.1") if rank == 0 else None

    def connect(self, rendezvous: bytes) -> None:
        assert self._group is not None
        self._group.connect(rendezvous, MOVE_S)

    def prepare(
        self,
        plan: RankPlan,
        source: RankLayout,
        shared: sharing.SharedMemory | None,
        is_new: bool,
        direct_nbytes: int,
    ) -> int:
        """As a new rank over the old one's memory, or as an old one that is leaving; the bytes of staging."""
        if is_new:
            self._mapped = sharing.open(shared) if shared is not None else []
            views = (self._mapped, source, self._views, self._layout)
        else:
            views = (self._views, source, [], ())
        self._mover = Mover(plan, self._group, *views, self.device, direct_nbytes)
        return self._mover.prepare()

    def move(self) -> MoveReport:
        assert self._mover is not None
        return self._mover.run(MOVE_S)

    def move_by_slices(self, plan: RankPlan, source: RankLayout) -> float:
        """The plan's rounds with one message a slice, as a straightforward loop would do it; seconds."""
        views = {"src": (self._mapped or self._views, source), "dst": (self._views, self._layout)}

        def slice_of(move: Move, end: str) -> torch.Tensor:
            held, layout = views[end]
            shard = getattr(move, f"{end}_shard")
            return held[shard][move.box.slices_in(layout[shard].box)]

        group = self._group
        assert group is not None
        synchronize(self.device)
        start = time.perf_counter()
        for each in plan.rounds:
            for index in range(max(map(len, (*each.sends.values(), *each.receives.values())), default=0)):
                sends = {
                    peer: slice_of(moves[index], "src").contiguous().view(-1).view(torch.uint8)
                    for peer, moves in each.sends.items()
                    if index < len(moves)
                }
                arriving = {peer: moves[index] for peer, moves in each.receives.items() if index < len(moves)}
                buffers = {
                    peer: torch.empty(move.nbytes, dtype=torch.uint8, device=self.device)
                    for peer, move in arriving.items()
                }
                group.exchange(sends, buffers, MOVE_S)
                for peer, move in arriving.items():
                    into = slice_of(move, "dst")
                    into.copy_(buffers[peer].view(into.dtype).view(into.shape))
        synchronize(self.device)
        return time.perf_counter() - start

    def copy_local(self, plan: RankPlan, source: RankLayout) -> float:
        """Only the local copies of a plan, with the GPU to themselves; seconds."""
        mover = Mover(replace(plan, rounds=()), None, self._mapped, source, self._views, self._layout, self.device)
        mover.prepare()
        return min(mover.run(MOVE_S).local_s for _ in range(3))

    def close(self) -> None:
        if self._group is not None:
            self._group.destroy_group()
        if self._mover is not None:
            self._mover.close()
        self._mover, self._group, self._mapped = None, None, []

    # Training beside it ----------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Steps of large products of matrices, in a thread, until paused."""
        self._trainer = Trainer(self.device)

    def step_times(self) -> list[tuple[float, float]]:
        """(end on this host's clock, seconds) of each step so far."""
        assert self._trainer is not None
        return list(self._trainer.steps)

    def pause(self) -> float:
        """Stop after the step that is running; when it ended."""
        assert self._trainer is not None
        self._trainer.pause()
        return self._trainer.steps[-1][0]

    def begin(self) -> float:
        """Start the first step of a new generation; when it started."""
        started = time.monotonic()
        self._trainer = Trainer(self.device)
        return started

    # Rates -----------------------------------------------------------------------------------------------------------

    def line_rate(self, nbytes: int, peer: int) -> float:
        """Bytes per second each way of one message to the peer and one from it, at once."""
        out = torch.ones(nbytes, dtype=torch.uint8, device=self.device)
        into = torch.empty_like(out)
        group = self._group
        assert group is not None
        return nbytes / least_s(lambda: group.exchange({peer: out}, {peer: into}, MOVE_S), self.device, 6)

    def copy_rate(self, nbytes: int) -> float:
        """Bytes per second, counted once, of a copy within the device."""
        out = torch.ones(nbytes, dtype=torch.uint8, device=self.device)
        into = torch.empty_like(out)
        return nbytes / least_s(lambda: into.copy_(out), self.device, 6)


class Trainer:
    """A stand-in for training: a thread that keeps the GPU busy in steps."""

    def __init__(self, device: torch.device) -> None:
        self.steps: list[tuple[float, float]] = []
        self._stop = threading.Event()
        size = 4096 if device.type == "cuda" else 256
        self._matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def pause(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        if self._matrix.is_cuda:
            torch.cuda.set_device(self._matrix.device)
        while not self._stop.is_set():
            start = time.monotonic()
            for _ in range(200 if self._matrix.is_cuda else 4):
                torch.mm(self._matrix, self._matrix)
            if self._matrix.is_cuda:
                torch.cuda.current_stream().synchronize()
            end = time.monotonic()
            self.steps.append((end, end - start))


def typed(octets: torch.Tensor, shard: Shard) -> torch.Tensor:
    return octets.view(getattr(torch, shard.tensor.dtype)).view(shard.box.lengths)


def with_truth(view: torch.Tensor, shard: Shard) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of a view as integers, each with the bytes that belong there: products of a row's and a column's number.

    Columns are counted along the last dim, rows over all before it; of a vector every element is a row.
    """
    integers = as_integers(view)
    if not integers.numel():
        return
    box, shape = shard.box, shard.tensor.shape
    if len(shape) == 1:
        box, shape = Box((*box.offsets, 0), (*box.lengths, 1)), (*shape, 1)
    row_numbers = torch.zeros(1, dtype=torch.int64, device=view.device)
    for offset, length, size in zip(box.offsets[:-1], box.lengths[:-1], shape[:-1], strict=True):
        along = torch.arange(offset, offset + length, device=view.device)
        row_numbers = (row_numbers[:, None] * size + along[None, :]).flatten()
    integers = integers.view(len(row_numbers), box.lengths[-1])
    first = torch.arange(box.offsets[-1], box.offsets[-1] + box.lengths[-1], device=view.device)
    columns = _numbers(shard.tensor, 1, first, integers)
    at_once = max(1, CHUNK_NUMEL // box.lengths[-1])
    for start in range(0, len(row_numbers), at_once):
        part = integers[start : start + at_once]
        rows = _numbers(shard.tensor, 0, row_numbers[start : start + at_once], integers)
        yield part, rows[:, None] * columns[None, :]


def _numbers(tensor: TensorSpec, dim: int, places: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    salt = sum(index * code for index, code in enumerate(f"{tensor.kind} {tensor.name} {dim}".encode(), 1))
    return (((places + 1) * 2654435761 + salt * 40503) >> 7 | 1).to(like.dtype)
