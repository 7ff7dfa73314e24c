"""Passes: copies and checksums of many slices, described before the pause so that each is one call within it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ray_etc.actors.sums import weighted_sum

WIDTHS = (16, 4, 2, 1)
"""Bytes that the kernel loads at once; the largest that fits the memory of a job is taken."""
MAX_UNITS = 2**31 - 2**16
"""Units of a job are counted in 32 bits."""
TABLE_ALIGNMENT = 16
"""Bytes; what Triton takes a pointer to be aligned to, where it is."""
TICKET_CHUNKS = 16
"""Chunks that a program of a shared pass draws at once: 8 MiB, so that adding up its sums costs a sixteenth."""


@dataclass(frozen=True, slots=True)
class Job:
    """Copy `source` to `destination`; add what was read to sum number `left`, what then lies there to `arrived`.

    Both are integers of one width (see `sums.as_integers`) and of equal shape, with any strides. Without a source, the
    destination is only summed; without a destination, the source. No number, no sum.
    """

    source: torch.Tensor | None
    destination: torch.Tensor | None
    left: int | None = None
    arrived: int | None = None

    @property
    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Source and destination; one of them twice where there is no other."""
        source = self.destination if self.source is None else self.source
        destination = self.source if self.destination is None else self.destination
        assert source is not None
        assert destination is not None
        return source, destination

    @property
    def form(self) -> tuple[bool, bool, bool]:
        """Whether it copies, sums what leaves, and sums what arrived."""
        return None not in (self.source, self.destination), self.left is not None, self.arrived is not None


class Pass:
    """Jobs that are carried out together, in no order. `load` makes it ready beforehand; else its first run does.

    Args:
        jobs: all of one form.
        sums: int64, one a sum of the rank, on the device of the jobs.
        share: of the GPU's processors, for what runs beside it.
        ticket: one int64 on the device, 0 when `run` is called. With it, `join` lends the pass the rest of the GPU.
    """

    def __init__(
        self, jobs: Sequence[Job], sums: torch.Tensor, share: float = 1.0, ticket: torch.Tensor | None = None
    ) -> None:
        self.jobs = [job for job in jobs if job.ends[0].numel()]
        self.sums, self.share, self.ticket = sums, share, ticket
        self.launch: _Launch | None = None
        """On GPUs, once loaded."""

    def __bool__(self) -> bool:
        return bool(self.jobs)

    def run(self) -> None:
        """On GPUs one launch on the current stream; on CPUs done when it returns."""
        if self.sums.is_cuda:
            if self.jobs:
                self._loaded().start()
            return
        for job in self.jobs:
            if job.source is not None and job.left is not None:
                self.sums[job.left] += weighted_sum(job.source)
            if job.source is not None and job.destination is not None:
                job.destination.copy_(job.source)
            if job.destination is not None and job.arrived is not None:
                self.sums[job.arrived] += weighted_sum(job.destination)

    def join(self) -> None:
        """Take over, on the current stream and the whole GPU, what a `run` on another has not begun; no-op on CPUs."""
        if self.sums.is_cuda and self.jobs:
            self._loaded().join()

    def _loaded(self) -> _Launch:
        if self.launch is None:
            load([self])
        assert self.launch is not None
        return self.launch


def load(passes: Iterable[Pass]) -> None:
    """Make passes over one GPU ready: kernels compiled and loaded, all tables there by one copy; no-op on CPUs.

    Each copy and each launch interrupts whoever trains on that GPU: two for every pass would be felt.
    """
    ready = [each for each in passes if each and each.sums.is_cuda]
    if not ready:
        return
    described = [job_table(each.jobs) for each in ready]
    tables = _upload([array for table, _ in described for array in (table, chunk_table(table))], ready[0].sums.device)
    for each, (_, dims), table, chunks in zip(ready, described, tables[::2], tables[1::2], strict=True):
        each.launch = _Launch(each, dims, table, chunks)


def _upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Each array on the device, flat and of its own type."""
    sizes = [-(-array.nbytes // TABLE_ALIGNMENT) * TABLE_ALIGNMENT for array in arrays]
    starts = np.cumsum([0, *sizes])
    host = np.zeros(starts[-1], dtype=np.uint8)
    for start, array in zip(starts[:-1], arrays, strict=True):
        host[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    there = torch.from_numpy(host).to(device)
    return [
        there[start : start + array.nbytes].view(getattr(torch, str(array.dtype)))
        for start, array in zip(starts[:-1], arrays, strict=True)
    ]


class _Launch:
    """A pass's kernel with its tables on the GPU."""

    def __init__(self, of: Pass, dims: int, table: torch.Tensor, chunks: torch.Tensor) -> None:
        from ray_etc.actors.kernels.tiles import (
            WARPS,
            copy_and_sum,
        )  # needs triton, which only comes with torch for GPUs

        # No reference to the pass: in a cycle with it, memory would stay mapped until Python collects garbage.
        sums, ticket, share = of.sums, of.ticket, of.share
        [form] = {job.form for job in of.jobs}
        constants = {
            "DIMS": dims,
            **dict(zip(("COPY", "LEFT", "ARRIVED"), form, strict=True)),
            "TICKETS": ticket is not None,
            "num_warps": WARPS,
        }
        chunk_count = len(chunks) // 2
        processors = torch.cuda.get_device_properties(sums.device).multi_processor_count

        def kernel(share: float, chunk_count: int, ticket_count: int) -> None:
            programs = min(max(chunk_count, 1), max(1, round(share * processors)))
            copy_and_sum[(programs,)](table, chunks, chunk_count, ticket, ticket_count, sums, **constants)

        # Triton compiles anew for pointers that are not aligned.
        aligned = tuple(each is not None and each.data_ptr() % TABLE_ALIGNMENT == 0 for each in (sums, ticket))
        variant = (sums.device, aligned, tuple(constants.items()))
        if variant not in _LOADED:
            kernel(share, 0, 0)
            _LOADED.add(variant)
        ticket_count = -(-chunk_count // TICKET_CHUNKS)
        self.start = partial(kernel, share, chunk_count, ticket_count)
        self.join = partial(kernel, 1.0, chunk_count, ticket_count)


_LOADED: set[tuple[object, ...]] = set()
"""Variants of the kernel that this process has compiled and loaded."""


def job_table(jobs: Sequence[Job]) -> tuple[np.ndarray, int]:
    """The rows that the kernel reads (see kernels/tiles.py), int64, and how many dims each has.

    Raises:
        ValueError: a slice has more units than 32 bits count.
    """
    described = [_describe(job) for job in jobs]
    dims = max(len(sizes) for _, sizes, _, _ in described)
    rows = []
    for job, (width, sizes, source_strides, destination_strides) in zip(jobs, described, strict=True):
        source, destination = job.ends
        units = source.nbytes // width
        if units > MAX_UNITS:
            raise ValueError(f"a slice of {tuple(source.shape)} is {units} pieces of {width} bytes, over {MAX_UNITS}")
        fill = dims - len(sizes)
        rows.append(
            [
                *(source.data_ptr(), destination.data_ptr(), units, width, job.left or 0, job.arrived or 0),
                *(*sizes, *[1] * fill, *source_strides, *[0] * fill, *destination_strides, *[0] * fill),
            ]
        )
    return np.array(rows, dtype=np.int64), dims


def chunk_table(table: np.ndarray) -> np.ndarray:
    """Pairs of int32, (row of the table, first tile), that cut all jobs into work of about equal size."""
    from ray_etc.actors.kernels.tiles import CHUNK_TILES, TILE_NBYTES

    counts = -(-table[:, 2] * table[:, 3] // (TILE_NBYTES * CHUNK_TILES))
    rows = np.repeat(np.arange(len(table)), counts)
    firsts = (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)) * CHUNK_TILES
    return np.stack([rows, firsts], axis=1).astype(np.int32)


def _describe(job: Job) -> tuple[int, list[int], list[int], list[int]]:
    """(width, sizes in units, source strides, destination strides in bytes), innermost first, of as few dims as do."""
    source, destination = job.ends
    itemsize = source.element_size()
    # The bytes of an element are the innermost dim, which the next one joins where elements lie side by side.
    sizes, ours, theirs = [itemsize], [1], [1]
    for size, a, b in zip(source.shape[::-1], source.stride()[::-1], destination.stride()[::-1], strict=True):
        if size == 1:
            continue
        if a * itemsize == sizes[-1] * ours[-1] and b * itemsize == sizes[-1] * theirs[-1]:
            sizes[-1] *= size
        else:
            sizes.append(size)
            ours.append(a * itemsize)
            theirs.append(b * itemsize)
    steps = (source.data_ptr(), destination.data_ptr(), sizes[0], *ours[1:], *theirs[1:])
    width = next(width for width in WIDTHS if not any(step % width for step in steps))
    return width, [sizes[0] // width, *sizes[1:]], [width, *ours[1:]], [width, *theirs[1:]]
