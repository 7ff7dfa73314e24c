"""An independent way from one configuration to another: Megatron's own distributed checkpoint.

It shares nothing with the catalogue but the model: its names are those of homogeneous layers, gate and up are one
tensor, ZeRO-1 shards are gathered and cut again by Megatron, and padding is grown and trimmed by its loader.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model

from ray_etc.megatron.compat import leaf_optimizers

Task = Any
"""A `ray_etc.megatron.Task` or a `Trainee`."""

# Megatron saves the main weights under one name with ZeRO-1 and under another without, so it cannot load one as the
# other by itself.
MAIN_PARAM_PREFIXES = ("optimizer.state.param.", "optimizer.state.fp32_param.")


def save_with_megatron(task: Task, folder: Path) -> None:
    """Write a checkpoint of the whole state into an empty folder that all ranks see."""
    # A save that waits for itself needs no helper process to collect its results.
    filesystem_async._results_queue = queue.SimpleQueue()
    with _gathered(task):
        content = {**_sharded(task, is_loading=False), "replicated": task.state.small_state()["replicated"]}
        dist_checkpointing.save(content, str(folder))


def load_with_megatron(task: Task, folder: Path) -> None:
    """Fill `task`, under whatever configuration it is, from a checkpoint; its state keeps its memory."""
    content = _sharded(task, is_loading=True)
    saved = dist_checkpointing.load_tensors_metadata(str(folder)).keys()
    prefixes = [prefix for prefix in MAIN_PARAM_PREFIXES if any(key.startswith(prefix) for key in saved)]
    if not prefixes:
        # fp32 without ZeRO-1: the weights are their own main weights, and are saved once.
        for leaf_state in _by_leaf(task, content["optimizer"]):
            for tensors in leaf_state.get("param_state", {}).values():
                del tensors["param"]
    else:
        content["optimizer"] = _map_values(content["optimizer"], partial(_main_params_named, prefixes[0]))
    loaded = dist_checkpointing.load(content, str(folder))
    for number, chunk in enumerate(task.chunks):
        chunk.module.load_state_dict(loaded["model"][f"model{number}"], strict=False)
    with torch.no_grad():
        for leaf, leaf_state in zip(leaf_optimizers(task.optimizer), _by_leaf(task, loaded["optimizer"]), strict=True):
            if isinstance(leaf, DistributedOptimizer):
                _load_distributed(leaf, leaf_state["param_state"])
            else:
                _load_plain(leaf, leaf_state)
    for name, item in task.state.replicated.items():
        item.load_state_dict(loaded["replicated"][name])


@dataclass(frozen=True)
class NamedPart:
    """One rank's part of one tensor of a checkpoint."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: torch.Tensor


def parts_by_megatron(task: Task) -> list[NamedPart]:
    """What this rank would write into a checkpoint. All ranks call it, because ZeRO-1 gathers."""
    with _gathered(task):
        return _parts(task)


def _parts(task: Task) -> list[NamedPart]:
    parts = []
    values: list[Any] = list(nested_values(_sharded(task, is_loading=False)))
    while values:
        value = values.pop()
        if isinstance(value, ShardedTensorFactory):
            values.extend(nested_values(value.build()))
        elif isinstance(value, ShardedTensor):
            units = value.prepend_axis_num
            shape = list(value.global_shape)
            if value.allow_shape_mismatch:  # the padded vocabulary
                shape[units] = task.config.vocab_size
            data = value.data.detach().to("cpu", copy=True).view(*[1] * units, *value.local_shape)
            parts.append(NamedPart(_main_params_named("main.", value).key, tuple(shape), value.global_offset, data))
    return parts


def whole_by_megatron(ranks: Iterable[list[NamedPart]]) -> dict[str, torch.Tensor]:
    """The tensors by Megatron's names, without padding. Fails where an element is held by no rank, or not alike."""
    tensors: dict[str, torch.Tensor] = {}
    written: dict[str, torch.Tensor] = {}
    for part in (part for parts in ranks for part in parts):
        whole = tensors.setdefault(part.key, torch.zeros(part.shape, dtype=part.values.dtype))
        done = written.setdefault(part.key, torch.zeros(part.shape, dtype=torch.bool))
        assert tuple(whole.shape) == part.shape, f"ranks disagree on the shape of {part.key}"
        index = tuple(slice(first, first + n) for first, n in zip(part.offset, part.values.shape, strict=True))
        target, there = whole[index], done[index]
        values = part.values[tuple(slice(n) for n in target.shape)]
        assert same_bits(target[there], values[there]), f"replicas of {part.key} differ"
        target.copy_(values)
        there.fill_(True)
    assert not [key for key, done in written.items() if not bool(done.all())], "elements that no rank holds"
    for key in [key for key in tensors if key.startswith("main.")]:
        # An fp32 weight is its own main weight, which Megatron saves once more with ZeRO-1 only.
        weight = tensors[key.removeprefix("main.")]
        if weight.dtype == tensors[key].dtype:
            assert same_bits(tensors.pop(key), weight)
    return tensors


def memory_by_megatron(task: Task) -> dict[str, torch.Tensor]:
    """A copy of all that this rank trains with, padding and all, as the model and the optimizers hold it."""
    held: dict[str, torch.Tensor] = {}
    for number, chunk in enumerate(task.chunks):
        saved = chunk.module.state_dict()
        named = [*chunk.module.named_parameters(), *chunk.module.named_buffers()]
        held |= {f"{number} {name}": value for name, value in named if name in saved}
    for number, leaf in enumerate(leaf_optimizers(task.optimizer)):
        for group, params in enumerate(group["params"] for group in leaf.optimizer.param_groups):
            for position, main in enumerate(params):
                for kind, value in {"main": main, **leaf.optimizer.state[main]}.items():
                    held[f"{kind} {number}.{group}.{position}"] = value
    with _gathered(task):
        return {name: value.detach().to("cpu", copy=True) for name, value in held.items()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Unlike `torch.equal`, true for the same NaN and false for zeros of different signs."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).contiguous().view(torch.uint8), b.reshape(-1).contiguous().view(torch.uint8))


@contextmanager
@torch.no_grad()
def _gathered(task: Task) -> Iterator[None]:
    """With `overlap_param_gather`, the whole weights, as Megatron gathers them to save; afterwards what was there.

    So looking changes nothing, and it is left to the next forward pass to gather.
    """
    chunks = [chunk for chunk in task.chunks if chunk.ddp_config.overlap_param_gather]
    before = [(param, param.clone()) for chunk in chunks for param in chunk.parameters()]
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)
        chunk.reset_param_sync_dispatch_state()
    yield
    for param, value in before:
        param.copy_(value)


def _sharded(task: Task, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = {
        f"model{number}": unwrap_model(chunk).sharded_state_dict(metadata=metadata)
        for number, chunk in enumerate(task.chunks)
    }
    optimizer = task.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def _by_leaf(task: Task, optimizer: dict[Any, Any]) -> list[dict[str, Any]]:
    """What belongs to each of several chained optimizers."""
    leaves = leaf_optimizers(task.optimizer)
    return [optimizer] if len(leaves) == 1 else [optimizer[number] for number in range(len(leaves))]


def _main_params_named(prefix: str, value: Any) -> Any:
    for other in MAIN_PARAM_PREFIXES:
        if getattr(value, "key", "").startswith(other):
            return replace(value, key=prefix + value.key.removeprefix(other))
    return value


def _map_values(tree: Any, change: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _map_values(value, change) for key, value in tree.items()}
    return [_map_values(value, change) for value in tree] if isinstance(tree, list) else change(tree)


def _load_distributed(leaf: DistributedOptimizer, param_state: Any) -> None:
    # With torch's Adam, Megatron looks for a "step" that this format does not have; None makes it skip a tensor.
    original = leaf._set_main_param_and_optimizer_states

    def skip_step(param: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        original(param, {"step": None, "param": None, **tensors})

    leaf._set_main_param_and_optimizer_states = skip_step
    leaf.load_parameter_state_from_fully_reshardable(param_state)
    del leaf._set_main_param_and_optimizer_states


def _load_plain(leaf: MegatronOptimizer, loaded: dict[str, Any]) -> None:
    """In place, because torch's own `load_state_dict` would put other tensors into the optimizer."""
    mains = loaded.get("fp32_from_fp16_params")
    states = (loaded["optimizer"] if mains else loaded)["state"]
    index = 0
    for group, params in enumerate(group["params"] for group in leaf.optimizer.param_groups):
        for position, param in enumerate(params):
            for name in leaf.optimizer.state[param].keys() - {"step"}:
                leaf.optimizer.state[param][name].copy_(states[index][name])
            if mains:
                param.data.copy_(mains[group][position])
            index += 1
