"""What a handover replaces: checkpoints of the same state, saved under data parallelism with ZeRO-1 and loaded under
tensor parallelism, by as many ranks.

Optimizer state is held by equal parts of rows, weights by every rank; it is loaded by tensor-parallel parts. The
files are in memory, and then on disk. Everything is done twice, and the second time counts: the first has the machine
find memory for the files. What was just written to disk is read from the machine's cache, in the baselines' favour.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as ShardDim

from benchmarks import checkpoints
from benchmarks.processes import Process, call_all, each_its_own, end_all
from ray_etc.planners.layout import TensorSpec

KINDS = (
    ("dcp", "dcp_save", "dcp_load"),
    ("dcp_async", "dcp_async_save", "dcp_load"),
    ("megatron", "megatron_save", "megatron_load"),
)


class CheckpointRank:
    """One rank of the training that saves, and of the one that loads."""

    def __init__(self, gpu: int | None, world: int) -> None:
        self._world = world
        self._device = "cpu" if gpu is None else "cuda"
        if gpu is not None:
            torch.cuda.set_device(gpu)

    def join(self, rank: int, store: str) -> None:
        """Gloo for what checkpoints tell each other: no tensor travels between ranks."""
        dist.init_process_group("gloo", store=dist.FileStore(store, self._world), rank=rank, world_size=self._world)
        self._mesh = init_device_mesh(self._device, (self._world,))
        self._rank = rank

    def make(self, tensors: Sequence[TensorSpec]) -> int:
        """The state to save and the memory to load it to; the bytes of all of it, once."""
        self._tensors = list(tensors)
        self._held = {self._name(each): self._new(each, self._source(each), fill=True) for each in tensors}
        self._wanted = {self._name(each): self._new(each, self._target(each), fill=False) for each in tensors}
        return sum(torch.Size(each.shape).numel() * each.itemsize for each in tensors)

    def dcp_save(self, folder: str) -> dict[str, float]:
        return {"save_s": self._timed(lambda: checkpoints.dcp_save(self._held, folder))}

    def dcp_async_save(self, folder: str) -> dict[str, float]:
        """What training waits for at the call, and until the files are whole."""
        start = time.perf_counter()
        written = checkpoints.dcp_async_save(self._held, folder)
        stalled = time.perf_counter()
        written.result()
        return {"stall_s": stalled - start, "write_s": time.perf_counter() - stalled}

    def dcp_load(self, folder: str) -> dict[str, float]:
        return {"load_s": self._timed(lambda: checkpoints.dcp_load(self._wanted, folder))}

    def megatron_save(self, folder: str) -> dict[str, float]:
        return {"save_s": self._timed(lambda: checkpoints.megatron_save(self._held, folder))}

    def megatron_load(self, folder: str) -> dict[str, float]:
        return {"load_s": self._timed(lambda: checkpoints.megatron_load(self._wanted, folder))}

    def spoil(self) -> None:
        for tensor in self._wanted.values():
            tensor.to_local().zero_()

    def is_right(self) -> bool:
        return all(
            torch.equal(self._wanted[self._name(each)].to_local(), self._truth(each, self._target(each)))
            for each in self._tensors
        )

    def _new(self, tensor: TensorSpec, placement: Placement, fill: bool) -> DTensor:
        part = self._truth(tensor, placement)
        local = part if fill else torch.zeros_like(part)
        return DTensor.from_local(local, self._mesh, [placement], run_check=False)

    def _truth(self, tensor: TensorSpec, placement: Placement) -> torch.Tensor:
        dtype = getattr(torch, tensor.dtype)
        rows, *rest = tensor.shape
        whole = torch.arange(rows, device=self._device).view(-1, *[1] * len(rest)) % 251
        if rest:
            whole = whole + torch.arange(rest[0], device=self._device) % 127
        part = whole.chunk(self._world, placement.dim)[self._rank] if isinstance(placement, ShardDim) else whole
        return part.to(dtype).contiguous()

    def _source(self, tensor: TensorSpec) -> Placement:
        return Replicate() if tensor.kind == "param" else ShardDim(0)

    def _target(self, tensor: TensorSpec) -> Placement:
        return Replicate() if tensor.split_dim is None else ShardDim(tensor.split_dim)

    def _name(self, tensor: TensorSpec) -> str:
        return f"{tensor.kind}.{tensor.name}"

    def _timed(self, action: Callable[[], Any]) -> float:
        start = time.perf_counter()
        action()
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def measure_baselines(
    tensors: Sequence[TensorSpec], places: Mapping[str, Path], gpus: int, world: int
) -> dict[str, Any]:
    """Seconds of each checkpoint's parts, the slower rank's, and whether every element came back, in each place."""
    ranks = [Process(CheckpointRank, rank % gpus if gpus else None, world) for rank in range(world)]
    result: dict[str, Any] = {}
    with ExitStack() as stack:
        stack.callback(end_all, ranks)
        folders = {place: Path(stack.enter_context(TemporaryDirectory(dir=folder))) for place, folder in places.items()}
        store = str(next(iter(folders.values())) / "store")
        each_its_own(ranks, "join", [(rank, store) for rank in range(world)])
        result["state_bytes"] = call_all(ranks, "make", list(tensors))[0]
        for place, folder in folders.items():
            for kind, saves, loads in KINDS:
                if kind == "megatron" and not gpus:
                    continue  # it synchronizes a GPU
                name = f"{kind}.{place}"
                result[name] = _twice(ranks, saves, loads, folder / name)
                print(name, result[name], flush=True)
    return result


def _twice(ranks: Sequence[Process], saves: str, loads: str, folder: Path) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)
        call_all(ranks, "spoil")
        done = [*call_all(ranks, saves, str(folder)), *call_all(ranks, loads, str(folder))]
        parts = {name: max(each.get(name, 0.0) for each in done) for each in done for name in each}
    shutil.rmtree(folder)
    return {**parts, "checkpoint_s": sum(parts.values()), "is_right": all(call_all(ranks, "is_right"))}
