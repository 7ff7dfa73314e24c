"""An independent way from one configuration to another: Megatron's own distributed checkpoint.

It shares nothing with the catalogue but the model: its names are those of homogeneous layers, gate and up are one
tensor, ZeRO-1 shards are gathered and cut again by Megatron, and padding is grown and trimmed by its loader.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from ray_etc.megatron import Task
from ray_etc.megatron.compat import leaf_optimizers

# Megatron saves the main weights under one name with ZeRO-1 and under another without, so it cannot load one as the
# other by itself.
MAIN_PARAM_PREFIXES = ("optimizer.state.param.", "optimizer.state.fp32_param.")


def save_with_megatron(task: Task, folder: Path) -> None:
    """Write a checkpoint of the whole state into an empty folder that all ranks see."""
    content = {**_sharded(task, is_loading=False), "replicated": task.state.small_state()["replicated"]}
    dist_checkpointing.save(content, str(folder))


def load_with_megatron(task: Task, folder: Path) -> None:
    """Fill `task`, under whatever configuration it is, from a checkpoint; its state keeps its memory."""
    content = _sharded(task, is_loading=True)
    saved = dist_checkpointing.load_tensors_metadata(str(folder)).keys()
    prefixes = [prefix for prefix in MAIN_PARAM_PREFIXES if any(key.startswith(prefix) for key in saved)]
    if not prefixes:
        # fp32 without ZeRO-1: the weights are their own main weights, and are saved once.
        for tensors in content["optimizer"].get("param_state", {}).values():
            del tensors["param"]
    else:
        content["optimizer"] = _map_values(content["optimizer"], partial(_main_params_named, prefixes[0]))
    loaded = dist_checkpointing.load(content, str(folder))
    task.model.module.load_state_dict(loaded["model"], strict=False)
    (leaf,) = leaf_optimizers(task.optimizer)
    with torch.no_grad():
        if isinstance(leaf, DistributedOptimizer):
            _load_distributed(leaf, loaded["optimizer"]["param_state"])
        else:
            _load_plain(leaf, loaded["optimizer"])
    for name, item in task.state.replicated.items():
        item.load_state_dict(loaded["replicated"][name])


def _sharded(task: Task, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    module = task.model.module
    while hasattr(module, "module"):
        module = module.module
    model = module.sharded_state_dict(metadata=metadata)
    optimizer = task.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


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
            for name in ("exp_avg", "exp_avg_sq"):
                leaf.optimizer.state[param][name].copy_(states[index][name])
            if mains:
                param.data.copy_(mains[group][position])
            index += 1
