"""What Megatron-core gets wrong about the state of optimizers, mostly in checkpoints, and how it is put right."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer

from ray_etc.megatron import remainders
from ray_etc.megatron.compat import leaf_optimizers, moment_names, of_optimizer


def correct_positions(leaf: MegatronOptimizer) -> None:
    """Have Megatron find the state of each parameter where some of a group are in fp32 and others in 16 bits.

    Its optimizer has those in fp32 first, and it counts as if all were in order: it would save, and we would move, the
    state of one parameter as that of another.
    """
    if not isinstance(leaf, DistributedOptimizer):
        return
    for group, (wide, narrow) in enumerate(zip(leaf.model_fp32_groups, leaf.model_float16_groups, strict=True)):
        for position, param in enumerate([*wide, *narrow]):
            leaf.model_param_group_index_map[param] = (group, position)


# Checkpoints ---------------------------------------------------------------------------------------------------------


def require_checkpointable(optimizer: MegatronOptimizer) -> None:
    """Raise ValueError where Megatron cannot name an optimizer's tensors: it counts no weights but those in 16 bits."""
    for leaf in leaf_optimizers(optimizer):
        if isinstance(leaf, Float16OptimizerWithFloat16Params) and any(leaf.fp32_from_fp32_groups):
            raise ValueError(
                "Megatron's checkpoints cannot hold the optimizer state of fp32 weights among those in 16 bits without "
                "ZeRO-1; set use_distributed_optimizer=True, in the optimizer and in DDP, or keep all in one data type"
            )


def collect_results_of_saves_here() -> None:
    """A save that waits for itself needs no process to collect its results, which Megatron would start and leave."""
    filesystem_async._results_queue = queue.SimpleQueue()


@contextmanager
def true_ranges_in_checkpoints(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Have Megatron find the optimizer state of each parameter where it is while it gathers that for a checkpoint.

    It leaves the padding between buckets out of what it gathers, and then looks for parameters where they would be with
    it: of all buckets but the first it would save the state of other elements, and zeros at the end.
    """
    counted = [
        part
        for leaf in leaf_optimizers(optimizer)
        if isinstance(leaf, DistributedOptimizer)
        for buffer in leaf.buffers
        for part in (buffer, *buffer.buckets)
    ]
    before = [part.numel_unpadded for part in counted]
    for part in counted:
        part.numel_unpadded = part.grad_data.numel()
    try:
        yield
    finally:
        for part, numel in zip(counted, before, strict=True):
            part.numel_unpadded = numel


@contextmanager
def memory_stays(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Keep the optimizer's tensors where they are catalogued while Megatron gets ready to load a checkpoint.

    So that there are tensors to load into, it loads the optimizer's own state into it. They are there already, and
    Transformer Engine's Adam would put others in their place.
    """
    leaves: list[Any] = [leaf for leaf in leaf_optimizers(optimizer) if isinstance(leaf, DistributedOptimizer)]
    # It would have SGD make its state, too, and has nothing that does.
    without: list[Any] = [leaf for leaf in leaf_optimizers(optimizer) if leaf.init_state_fn is None]
    for leaf in leaves:
        leaf.load_state_dict = lambda _: None
    for leaf in without:
        leaf.init_state_fn = lambda *_: None
    try:
        yield
    finally:
        for leaf in leaves:
            del leaf.load_state_dict
        for leaf in without:
            leaf.init_state_fn = None


@contextmanager
def whole_main_weights(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Have Megatron find whole main weights where the optimizer has remainders of them (see remainders.py).

    It would write those as if they were weights, and could not read them again.
    """
    leaves: list[Any] = [leaf for leaf in leaf_optimizers(optimizer) if _keeps_remainders(leaf)]
    for leaf in leaves:
        leaf._get_main_param_and_optimizer_states = partial(_joined, leaf, leaf._get_main_param_and_optimizer_states)
    try:
        yield
    finally:
        for leaf in leaves:
            del leaf._get_main_param_and_optimizer_states


def _joined(leaf: Any, find: Callable[[Any], dict[str, torch.Tensor]], param: torch.nn.Parameter) -> dict[str, Any]:
    found = find(param)
    if found["param"].dtype == torch.int16:
        found["param"] = remainders.join(of_optimizer(leaf, param), found["param"])
    return found


def _keeps_remainders(leaf: MegatronOptimizer) -> bool:
    return bool(getattr(leaf.optimizer, "store_param_remainders", False))


def load_optimizer_tensors(leaf: MegatronOptimizer, loaded: dict[str, Any]) -> None:
    """Copy what was loaded for `leaf`'s own `sharded_state_dict` into the memory that it trains with."""
    if isinstance(leaf, DistributedOptimizer):
        original = leaf._set_main_param_and_optimizer_states

        def put(param: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
            # With torch's Adam, Megatron looks for a "step" that this format does not have; None has it skip a tensor.
            tensors = {"step": None, "param": None, **tensors}
            held = of_optimizer(leaf, param)
            if _keeps_remainders(leaf) and held.dtype == torch.bfloat16:
                tensors["param"] = remainders.put(tensors["param"], held.detach())
            original(param, tensors)

        leaf._set_main_param_and_optimizer_states = put
        try:
            leaf.load_parameter_state_from_fully_reshardable(loaded["param_state"])
        finally:
            del leaf._set_main_param_and_optimizer_states
        for chunk in leaf.model_chunks if _keeps_remainders(leaf) else ():
            chunk.start_param_sync(force_sync=True)  # a replica may have been rounded the other way
        return
    # Not by torch's `load_state_dict`, which would put other tensors into the optimizer than those that are catalogued.
    mains = loaded.get("fp32_from_fp16_params")
    states = (loaded["optimizer"] if mains else loaded).get("state", {})
    index = 0
    with torch.no_grad():
        for group, params in enumerate(group["params"] for group in leaf.optimizer.param_groups):
            for position, param in enumerate(params):
                for name in moment_names(leaf):
                    leaf.optimizer.state[param][name].copy_(states[index][name])
                if mains:
                    param.copy_(mains[group][position])
                index += 1


def saved_step(saved: dict[str, Any]) -> int | None:
    """Adam's step count in what Megatron saved of an optimizer: beside the moments, or with ZeRO-1 in the groups."""
    inner = saved.get("optimizer", saved)
    counts = [group.get("step") for group in inner["param_groups"]] + [inner.get("state", {}).get("common_step")]
    return max((int(count) for count in counts if count is not None), default=None)
