"""The memory behind a rank's state: allocations that can be emptied, made again and released, a few at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

from ray_etc.actors import sharing
from ray_etc.actors.messages import Usage
from ray_etc.actors.transports.base import Deadline
from ray_etc.planners.layout import Allocations
from ray_etc.planners.memory import STAGING_BUFFERS, STAGING_NBYTES

SHADOW_NBYTES = 4 * 2**30
"""What a second process takes of a GPU besides its state and staging: a context, communicators, libraries. On an H200
one rank took 2.4 GiB before it connected for the handover, and training meanwhile 0.2 more than when it was asked."""
COMMUNICATOR_NBYTES = 2**30
"""Of that, set aside for the communicator of a handover, which comes after all the rest: assumed, not measured."""
MOST_OF_SLOT = 8
"""Training leaves at most one in so many bytes of its slot free, however small the GPU."""


def training_nbytes(total: int, share: float, limit_nbytes: int | None) -> float:
    """What torch may take of a GPU of `total` bytes for training, so that the next generation's shadow fits beside it.

    `share` is that of its slot, `limit_nbytes` what all processes of the slot may have, if that is less.
    """
    slot = min((share or 1.0) * total, limit_nbytes or total)
    return slot - min(SHADOW_NBYTES + 2 * STAGING_BUFFERS * STAGING_NBYTES, slot / MOST_OF_SLOT)


def limit_training(share: float, limit_nbytes: int | None) -> None:
    """Hold torch to `training_nbytes` on this process's GPU."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(training_nbytes(total, share, limit_nbytes) / total, 0)


def part_of_gpu(free: int, total: int, reserved: int, share: float) -> tuple[int, int]:
    """Free and total bytes of a slot, from those of its GPU.

    Nobody can tell whose the rest of a shared GPU is: there a slot has left what its part is more than what its process
    has `reserved` and takes besides.
    """
    if share >= 1.0:
        return free, total
    part = int(share * total)
    return min(free, part - reserved - SHADOW_NBYTES), part


class StateMemory:
    """The allocations of one rank, numbered in the order in which its views first lie in them.

    Args:
        views: the memory of its shards.
        scratch: memory that no step needs from the one before, such as gradient buffers.
    """

    def __init__(self, views: Sequence[torch.Tensor], scratch: Sequence[torch.Tensor] = ()) -> None:
        self._views = list(views)
        self._storages, self._layouts = sharing.storages_of(views)
        self.allocations = Allocations(
            tuple(layout.storage for layout in self._layouts), tuple(storage.nbytes() for storage in self._storages)
        )
        own = {storage._cdata for storage in self._storages}
        apart = [storage for storage in sharing.storages_of(scratch)[0] if storage._cdata not in own]
        self._scratch = [(storage, storage.nbytes()) for storage in apart]
        self._handles: dict[int, sharing.HostHandle | sharing.CudaHandle] = {}
        self._rests: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self._held = set(range(len(self._storages)))

    @property
    def device(self) -> torch.device:
        return self._views[0].device

    @property
    def nbytes_held(self) -> int:
        """Of all allocations that are there now."""
        return sum(self.allocations.nbytes[number] for number in self._held)

    @property
    def nbytes_scratch(self) -> int:
        """Of the scratch memory, there or not."""
        return sum(nbytes for _, nbytes in self._scratch)

    def nbytes_allocated(self) -> int:
        """What torch's allocator has given out in this process; on CPUs what is held of state and scratch memory."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return self.nbytes_held + sum(storage.nbytes() for storage, _ in self._scratch)

    def reset_peak(self) -> None:
        """Begin to measure `nbytes_peak`."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def nbytes_peak(self, staging_nbytes: int) -> int:
        """The most that was allocated since `reset_peak`; on CPUs `staging_nbytes` beside what is now."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return self.nbytes_allocated() + staging_nbytes

    def usage(self, share: float = 1.0, nbytes_between_steps: int | None = None) -> Usage:
        """`share` is the slot's, of a GPU; `nbytes_between_steps` what torch has given out then, where it is known."""
        if self.device.type != "cuda":
            return Usage(None, None, self.nbytes_held + self.nbytes_scratch, self.nbytes_scratch)
        reserved = torch.cuda.memory_reserved(self.device)
        free, total = part_of_gpu(*torch.cuda.mem_get_info(self.device), reserved, share)
        kept = max(0, (nbytes_between_steps or 0) - self.nbytes_held - self.nbytes_scratch)
        return Usage(total, free, reserved, self.nbytes_scratch, kept)

    def room(self, share: float) -> int | None:
        """Bytes that the GPU has for state, scratch memory and staging of this process, with what it has of them now.

        None where nobody can tell: on CPUs, and of a GPU of which the slot has only a `share`.
        """
        if self.device.type != "cuda" or share < 1.0:
            return None
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        scratch = sum(storage.nbytes() for storage, _ in self._scratch)
        return torch.cuda.mem_get_info(self.device)[0] + unused + self.nbytes_held + scratch

    def share(self) -> sharing.SharedMemory:
        """What another process on this machine needs to map the views; see `sharing.share`."""
        for number, storage in enumerate(self._storages):
            if number not in self._handles:
                self._handles[number] = sharing.share_storage(storage)
        return sharing.SharedMemory(tuple(self._handles[n] for n in range(len(self._storages))), self._layouts)

    def empty(self) -> None:
        """Free everything that is not yet shared, scratch too, so that `make` can give it back."""
        for number, storage in enumerate(self._storages):
            self._rests[number] = self._rest_of(number)
            storage.resize_(0)
        self._held.clear()
        self.empty_scratch()

    def fill(self) -> None:
        """Give everything back that was emptied."""
        self.make(sorted(self._rests))
        self.make_scratch()

    def make(self, numbers: Iterable[int]) -> None:
        """Give emptied allocations back, for views to be written to, and share them. What lies beside the views is
        as it was, and gaps within them are zero."""
        for number in numbers:
            storage = self._storages[number]
            storage.resize_(self.allocations.nbytes[number])
            octets = _octets(storage)
            octets.zero_()
            for start, rest in self._rests.pop(number):
                octets[start : start + len(rest)] = rest.to(octets.device)
            self._handles[number] = sharing.share_storage(storage)
            self._held.add(number)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def release(self, numbers: Iterable[int]) -> None:
        """Give shared allocations back to the machine, for good; nobody may have them mapped any more."""
        for number in set(numbers) & self._held:
            sharing.release(self._storages[number], self._handles.pop(number))
            self._held.discard(number)
        self.trim()

    def empty_scratch(self) -> None:
        for storage, _ in self._scratch:
            storage.resize_(0)
        self.trim()

    def make_scratch(self, timeout_s: float = 0.0) -> None:
        """Give the scratch memory back where it was emptied, as zeros. Where there is no room, who has it may still be
        dying: wait `timeout_s` for it."""
        deadline = Deadline(timeout_s)
        for storage, nbytes in self._scratch:
            while storage.nbytes() != nbytes:
                try:
                    storage.resize_(nbytes)
                except torch.OutOfMemoryError:
                    if deadline.left_s() <= 0:
                        raise
                    self.trim()
                    time.sleep(0.1)
                else:
                    _octets(storage).zero_()

    def trim(self) -> None:
        """Give back to the GPU what torch's allocator keeps for later."""
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def _rest_of(self, number: int) -> list[tuple[int, torch.Tensor]]:
        """(first byte, copy in host memory) of what lies in an allocation beside the views and is not zero."""
        octets = _octets(self._storages[number])
        rest = []
        start = 0
        spans = sorted(span for layout in self._layouts if layout.storage == number for span in [_span(layout)])
        for first, stop in [*spans, (len(octets), len(octets))]:
            if first > start and bool(octets[start:first].any()):
                rest.append((start, octets[start:first].to("cpu", copy=True)))
            start = max(start, stop)
        return rest


def _octets(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _span(layout: sharing.ViewLayout) -> tuple[int, int]:
    """First byte of a view in its storage, and the one after its last."""
    last = sum((length - 1) * stride for length, stride in zip(layout.shape, layout.strides, strict=True))
    numel = 0 if 0 in layout.shape else last + 1
    return layout.offset * layout.dtype.itemsize, (layout.offset + numel) * layout.dtype.itemsize
