"""Checkpoints by torch DCP and by Megatron `dist_checkpointing`, of a training state that is given as DTensors.

Every rank calls each function. States may be saved under one configuration and loaded, in place, under another.
"""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, async_save, load, save
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardDim

WRITERS = 8
"""Threads that write, a rank."""

State = dict[str, DTensor]


class _HostCopy(AsyncStager):
    """Copies each tensor to the host, once; torch's own stagers copy it twice, or all of the memory that it is in."""

    _synchronize_after_execute = False

    def stage(self, state_dict: Any) -> State:
        return {name: _on_host(tensor) for name, tensor in state_dict.items()}

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...


def _on_host(tensor: DTensor) -> DTensor:
    if tensor.device.type != "cpu":
        copied: Any = tensor.to("cpu")
        return copied
    return DTensor.from_local(tensor.to_local().clone(), tensor.device_mesh, tensor.placements, run_check=False)


def dcp_save(state: State, folder: str, group: dist.ProcessGroup | None = None) -> None:
    save(state, storage_writer=_writer(folder), process_group=group)


def dcp_async_save(state: State, folder: str, group: dist.ProcessGroup | None = None) -> Any:
    """Returns a future once the state has been copied to the host. `group` is of gloo, and used by nobody else."""
    return async_save(state, storage_writer=_writer(folder), process_group=group, async_stager=_HostCopy())


def dcp_load(state: State, folder: str, group: dist.ProcessGroup | None = None) -> None:
    load(state, storage_reader=FileSystemReader(folder), process_group=group)


def megatron_save(state: State, folder: str) -> None:
    """Fully parallel: replicas write different tensors."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    # A save that waits for itself needs no helper process to collect its results, which would outlive a killed rank.
    filesystem_async._results_queue = queue.SimpleQueue()

    Path(folder).mkdir(exist_ok=True)
    dist.barrier()
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), dist.group.WORLD)
    dist_checkpointing.save(_sharded(state), folder, strategy)


def megatron_load(state: State, folder: str) -> None:
    """Fully parallel: replicas read different tensors, and pass them on."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(folder), dist.group.WORLD)
    dist_checkpointing.load(_sharded(state), folder, strategy)


def _writer(folder: str) -> FileSystemWriter:
    return FileSystemWriter(folder, thread_count=WRITERS, single_file_per_rank=False)


def _sharded(state: State) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    rank, world = dist.get_rank(), dist.get_world_size()
    sharded = {}
    for name, tensor in state.items():
        [placement] = tensor.placements
        if isinstance(placement, ShardDim):
            offsets: tuple[Any, ...] = ((placement.dim, rank, world),)
            sharded[name] = ShardedTensor.from_rank_offsets(name, tensor.to_local(), *offsets)
        else:
            sharded[name] = ShardedTensor.from_rank_offsets(name, tensor.to_local(), replica_id=rank)
    return sharded
