"""Share the memory of a rank with another process on the same machine, without copying it.

Only metadata travels: a handle for each storage, and offset, shape, strides and type for each view. A rank has
thousands of views into a few storages.

On GPUs the handles are CUDA IPC. On CPUs the storage moves, in place, into an anonymous file of the kernel's, and the
other process opens it through /proc. That file has no name, so nothing is left in /dev/shm however either side dies,
and needs no helper process (torch's "file_system" strategy has both). Either way memory that is mapped stays readable
when its owner is killed, and memory that was not yet mapped then is lost.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.multiprocessing import reductions

_LIBC = ctypes.CDLL(None, use_errno=True)
_OFFSET = ctypes.c_longlong
_PUNCH_HOLE = 0x01 | 0x02
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of Linux: the file keeps its size and loses its memory."""


@dataclass(frozen=True, slots=True)
class HostHandle:
    """An anonymous file of process `pid`; `inode` tells whether the number still means that file."""

    pid: int
    descriptor: int
    inode: tuple[int, int]
    nbytes: int


@dataclass(frozen=True, slots=True)
class CudaHandle:
    """The arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor`; `alias` is only in the owner."""

    arguments: tuple[Any, ...]
    alias: Any = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return CudaHandle, (self.arguments,)


@dataclass(frozen=True, slots=True)
class ViewLayout:
    """Where a view lies in storage number `storage`; offset and strides in elements."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """What another process on this machine needs to map the views: metadata only, to be pickled.

    It can be opened again, by the next process, for as long as the owner keeps its tensors.
    """

    storages: tuple[HostHandle | CudaHandle, ...]
    views: tuple[ViewLayout, ...]


def storages_of(views: Sequence[torch.Tensor]) -> tuple[list[torch.UntypedStorage], tuple[ViewLayout, ...]]:
    """The storages behind the views, each once, and where every view lies in them."""
    numbers: dict[int, int] = {}
    storages: list[torch.UntypedStorage] = []
    layouts: list[ViewLayout] = []
    for view in views:
        storage = view.untyped_storage()
        if storage._cdata not in numbers:
            numbers[storage._cdata] = len(storages)
            storages.append(storage)
        layouts.append(
            ViewLayout(
                numbers[storage._cdata], int(view.storage_offset()), tuple(view.shape), tuple(view.stride()), view.dtype
            )
        )
    return storages, tuple(layouts)


def share(views: Sequence[torch.Tensor]) -> SharedMemory:
    """Make the memory of `views` available to another process, for as long as this process keeps it.

    Call it before training starts. On CPUs the bytes move, while every tensor that shares a torch storage with a view
    follows: the model's, the optimizer's, and views of views. What does not follow is a raw pointer taken before:
    a numpy array, or a kernel that is running. On GPUs nothing moves; the owner synchronizes before anyone reads.
    """
    storages, layouts = storages_of(views)
    return SharedMemory(tuple(map(share_storage, storages)), layouts)


def open(shared: SharedMemory, positions: Sequence[int] | None = None) -> list[torch.Tensor]:
    """The views, or those at `positions`, over the owner's memory. It is unmapped when the last of them is dropped.

    Raises:
        FileNotFoundError: the owner is gone, or this process cannot see it.
    """
    views, needed = shared.views, dict.fromkeys(range(len(shared.storages)))
    if positions is not None:
        views = tuple(shared.views[position] for position in positions)
        needed = dict.fromkeys(view.storage for view in views)
    storages = {number: _open_storage(shared.storages[number]) for number in needed}
    return [
        torch.empty(0, dtype=view.dtype, device=storages[view.storage].device).set_(
            storages[view.storage], view.offset, view.shape, view.strides
        )
        for view in views
    ]


def release(storage: torch.UntypedStorage, handle: HostHandle | CudaHandle) -> None:
    """Give the memory of a shared storage back, for good; what it held is gone. Nobody may have it mapped any more.

    On GPUs the storage is empty then, and torch's allocator has its memory. On CPUs its bytes read as zeros.
    """
    if isinstance(handle, CudaHandle):
        storage.resize_(0)
    elif handle.nbytes and _LIBC.fallocate(handle.descriptor, _PUNCH_HOLE, _OFFSET(0), _OFFSET(handle.nbytes)):
        raise OSError(ctypes.get_errno(), f"cannot release {handle.nbytes} bytes of shared memory")


def share_storage(storage: torch.UntypedStorage) -> HostHandle | CudaHandle:
    """A handle on one storage. On GPUs the owner keeps it for as long as anyone may open it."""
    if storage.device.type == "cuda":
        # torch keeps what it shared until exactly one reader has come and gone. Here there may be none, or several:
        # let it count them on an alias, which owns no memory.
        alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), storage.device, storage.nbytes())
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(alias)
        # Sharing records an event on the current stream. The default stream of a process that is stuck in a collective
        # never gets there.
        with torch.cuda.stream(_aside(storage.device)):
            *arguments, _ = reductions.reduce_tensor(whole)[1]
        # Readers need not wait for that event, one a storage: what they read is written later, and waited for.
        return CudaHandle((*arguments, False), alias)
    if storage.nbytes() == 0:
        return HostHandle(os.getpid(), -1, (0, 0), 0)
    descriptor, nbytes = storage._share_fd_cpu_()
    status = os.fstat(descriptor)
    return HostHandle(os.getpid(), descriptor, (status.st_dev, status.st_ino), nbytes)


@cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    """For sharing only: torch hands out few streams in turn, and another use of this one may be stuck."""
    return torch.cuda.Stream(device)


def _open_storage(handle: HostHandle | CudaHandle) -> torch.UntypedStorage:
    if isinstance(handle, CudaHandle):
        return reductions.rebuild_cuda_tensor(*handle.arguments).untyped_storage()
    if handle.nbytes == 0:
        return torch.UntypedStorage(0)
    path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise FileNotFoundError(
            f"cannot map the memory of process {handle.pid} ({error.strerror}): it is gone, or not in this process's "
            "PID namespace; processes that share memory run in one container"
        ) from error
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != handle.inode:
            raise FileNotFoundError(f"process {handle.pid} no longer holds the memory that it shared")
        return torch.UntypedStorage._new_shared_fd_cpu(descriptor, handle.nbytes)  # type: ignore[attr-defined]
    finally:
        os.close(descriptor)
