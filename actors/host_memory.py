"""Build a model whose memory is freed again before it is used, on a GPU that has no room for it.

While a tight handover is prepared the old generation still fills the GPU. So what torch allocates for the new model
meanwhile is memory of the host, at addresses that the GPU can reach (the driver's virtual memory management). State and
gradient buffers are then emptied, and made again as ordinary memory; what else the model has moves to the GPU, at the
addresses that it had. Managed memory would do this by itself, but more of it than a GPU has free can hang that GPU.
"""

from __future__ import annotations

import ctypes
import gc
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from ray_etc.planners.words import size

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_HOST = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
_GPU = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
_MINIMUM = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
_IS_SUPPORTED = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_NUMA_NODE = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID

KEPT_FREE = 16
"""One in so many bytes of the host stays free: where less than a twentieth is left, Ray ends workers, and later Linux
does, maybe one that trains."""


class HostMemory:
    """Where torch allocates in the thread that is between `begin` and `end`.

    Raises:
        RuntimeError: the driver cannot map memory of the host so.
    """

    _forever: list[HostMemory] = []  # noqa: RUF012 - torch calls back for as long as the process lives
    """Torch frees what is left of it when it will, by functions that must still be there."""

    def __init__(self) -> None:
        torch.cuda.synchronize()  # makes the context of this process, if there is none
        self._context = _done(driver.cuCtxGetCurrent())
        gpu = _done(driver.cuCtxGetDevice())
        if not _done(driver.cuDeviceGetAttribute(_IS_SUPPORTED, gpu)):
            raise RuntimeError(
                "a generation that has no room beside the old one is built in memory of the host, which this GPU's "
                "driver cannot map: update the driver, or leave room for both generations"
            )
        node = max(0, _done(driver.cuDeviceGetAttribute(_NUMA_NODE, gpu)))
        self._host, self._gpu = _at(_HOST, node), _at(_GPU, torch.cuda.current_device())
        granularity = partial(driver.cuMemGetAllocationGranularity, option=_MINIMUM)
        self._granularity = max(_done(granularity(each)) for each in (self._host, self._gpu))
        self._segments: dict[int, tuple[int, Any]] = {}
        """By address, of how many bytes each is and the memory that is mapped there."""
        self.refusal: str | None = None
        """Why memory was refused the last time it was asked for: torch's own error tells only of the GPU's."""
        self._functions = (_ALLOCATE(self._allocate), _FREE(self._free))
        self._forever.append(self)
        allocate, free = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._functions)
        self._allocator = torch._C._cuda_customAllocator(allocate, free)
        self._pool: Any = torch.cuda.MemPool(self._allocator)
        self._use = torch.cuda.use_mem_pool(self._pool)

    @property
    def nbytes(self) -> int:
        """Of all that torch allocated between `begin` and `end` and still has."""
        return sum(nbytes for nbytes, _ in self._segments.values())

    def begin(self) -> None:
        # Torch holds a lock while it calls `_allocate`, which waits for Python's. Should another thread have that and
        # free a tensor, in a collection of garbage, each would wait for the other.
        self._has_collector = gc.isenabled()
        gc.disable()
        self._use.__enter__()

    def end(self) -> None:
        """From now on torch allocates as usual."""
        self._use.__exit__(None, None, None)
        if self._has_collector:
            gc.enable()

    def settle(self) -> None:
        """Give back what was freed meanwhile, and move what is left to the GPU. Nothing may use it in that moment."""
        self._pool = None
        torch.cuda.synchronize()
        for address, (nbytes, on_host) in list(self._segments.items()):
            aside = self._reserve(nbytes)
            on_gpu = self._create(aside, nbytes, self._gpu)
            _done(driver.cuMemcpyDtoD(aside, address, nbytes))
            torch.cuda.synchronize()
            _done(driver.cuMemUnmap(aside, nbytes))
            _done(driver.cuMemAddressFree(aside, nbytes))
            _done(driver.cuMemUnmap(address, nbytes))
            _done(driver.cuMemRelease(on_host))
            self._map(address, nbytes, on_gpu)
            self._segments[address] = nbytes, on_gpu

    def _allocate(self, nbytes: int, device: int, stream: int | None) -> int | None:
        """Torch's call; None is its sign for memory that ran out."""
        nbytes = -(-nbytes // self._granularity) * self._granularity
        self.refusal = lack_of_memory(nbytes, self.nbytes, *host_nbytes())
        if self.refusal is not None:
            return None
        try:
            address = self._reserve(nbytes)
        except RuntimeError as error:
            self.refusal = str(error)
            return None
        try:
            self._segments[address] = nbytes, self._create(address, nbytes, self._host)
        except RuntimeError as error:
            self.refusal = str(error)
            driver.cuMemAddressFree(address, nbytes)
            return None
        return address

    def _free(self, address: int, nbytes: int, device: int, stream: int | None) -> None:
        nbytes, memory = self._segments.pop(address)
        driver.cuCtxSetCurrent(self._context)
        driver.cuCtxSynchronize()  # what was the last to use it may still be running
        driver.cuMemUnmap(address, nbytes)
        driver.cuMemRelease(memory)
        driver.cuMemAddressFree(address, nbytes)

    def _reserve(self, nbytes: int) -> int:
        return int(_done(driver.cuMemAddressReserve(nbytes, 0, 0, 0)))

    def _create(self, address: int, nbytes: int, where: driver.CUmemAllocationProp) -> Any:
        memory = _done(driver.cuMemCreate(nbytes, where, 0))
        try:
            self._map(address, nbytes, memory)
        except RuntimeError:
            driver.cuMemRelease(memory)
            raise
        return memory

    def _map(self, address: int, nbytes: int, memory: Any) -> None:
        _done(driver.cuMemMap(address, nbytes, 0, memory, 0))
        access = driver.CUmemAccessDesc()
        access.location = self._gpu.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _done(driver.cuMemSetAccess(address, nbytes, [access], 1))


def host_nbytes() -> tuple[int, int]:
    """Of this host's memory: all, and what a process could get now."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return total, available


def lack_of_memory(nbytes: int, held: int, total: int, available: int) -> str | None:
    """Why a host with so much memory does not give a process that has `held` of it `nbytes` more; None where it does.

    What the driver maps cannot be swapped out, so nothing else would give way.
    """
    room = max(0, available - total // KEPT_FREE)
    if nbytes <= room:
        return None
    return (
        f"a model without room on its GPU is built in memory of the host, has {size(held)} of that and asked for "
        f"{size(nbytes)} more, of {size(room)} there are for it ({size(available)} available, less a {KEPT_FREE}th of "
        f"{size(total)}): leave room for both generations on the GPU, or use hosts with more memory"
    )


def _at(kind: driver.CUmemLocationType, number: int) -> driver.CUmemAllocationProp:
    where = driver.CUmemAllocationProp()
    where.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    where.location.type, where.location.id = kind, number
    return where


def _done(answer: tuple[Any, ...]) -> Any:
    """What the driver answered.

    Raises:
        torch.OutOfMemoryError: the host, or the GPU, has not that much memory.
        RuntimeError: any other error.
    """
    error, *values = answer
    if error != driver.CUresult.CUDA_SUCCESS:
        kind = torch.OutOfMemoryError if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY else RuntimeError
        raise kind(f"CUDA: {_text(error)} while memory of a model that has no room on the GPU was made")
    return values[0] if values else None


def _text(error: driver.CUresult) -> str:
    _, text = driver.cuGetErrorString(error)
    return text.decode() if text else str(error)
