"""Build a model whose memory is freed again before it is used, on a GPU that has no room for it.

While a tight handover is prepared the old generation still fills the GPU. So what torch allocates for the new model
meanwhile is CUDA managed memory with its place on the host: its pages come into being when they are touched, and the
GPU reaches them there. State and gradient buffers are then emptied, and made again as ordinary memory; what else the
model has stays managed, and moves to the GPU when it is used.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_ATTACH_GLOBAL = 1
_SET_PREFERRED_LOCATION, _UNSET_PREFERRED_LOCATION, _SET_ACCESSED_BY = 3, 4, 5
_HOST = -1


class ManagedMemory:
    """Where torch allocates in the thread that is between `begin` and `end`."""

    _forever: list[ManagedMemory] = []  # noqa: RUF012 - torch calls back for as long as the process lives
    """Torch frees what is left of it when it will, by functions that must still be there."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._nbytes: dict[int, int] = {}
        self._functions = (_ALLOCATE(self._allocate), _FREE(self._free))
        self._forever.append(self)
        allocate, free = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._functions)
        self._pool: Any = torch.cuda.MemPool(torch._C._cuda_customAllocator(allocate, free))
        self._use = torch.cuda.use_mem_pool(self._pool)

    def begin(self) -> None:
        self._use.__enter__()

    def end(self) -> None:
        """From now on torch allocates as usual; what there is may move to the GPU."""
        self._use.__exit__(None, None, None)
        for address in self._nbytes:
            self._advise(address, _UNSET_PREFERRED_LOCATION, _HOST)

    def drop(self) -> None:
        """Give back what was freed meanwhile."""
        self._pool = None

    def _allocate(self, nbytes: int, device: int, stream: int | None) -> int | None:
        address = ctypes.c_uint64()
        if self._driver.cuMemAllocManaged(ctypes.byref(address), ctypes.c_size_t(nbytes), _ATTACH_GLOBAL):
            return None
        self._nbytes[address.value] = nbytes
        self._advise(address.value, _SET_PREFERRED_LOCATION, _HOST)
        self._advise(address.value, _SET_ACCESSED_BY, device)
        return address.value

    def _free(self, address: int, nbytes: int, device: int, stream: int | None) -> None:
        self._nbytes.pop(address, None)
        self._driver.cuMemFree_v2(ctypes.c_uint64(address))

    def _advise(self, address: int, advice: int, device: int) -> None:
        """A hint: where it is not taken, pages are just slower to reach."""
        size = ctypes.c_size_t(self._nbytes[address])
        self._driver.cuMemAdvise(ctypes.c_uint64(address), size, ctypes.c_int(advice), ctypes.c_int(device))
