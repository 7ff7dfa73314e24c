"""Every private name of Megatron-core that the adapter uses, in one place, and a probe that names what is missing."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import megatron.core
import torch
from megatron.core import num_microbatches_calculator
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer, MegatronOptimizer


def missing_names() -> list[str]:
    """The private names that this Megatron-core no longer has."""
    missing = [
        f"{owner.__name__}.{name}"
        for owner, name in (
            (DistributedOptimizer, "_get_main_param_and_optimizer_states"),
            (DistributedOptimizer, "_set_main_param_and_optimizer_states"),
            (filesystem_async, "_results_queue"),
            (num_microbatches_calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR"),
        )
        if not hasattr(owner, name)
    ]
    # Attributes that a constructor sets are not on the class; its code names them.
    for owner, name in (
        (DistributedOptimizer, "gbuf_ranges"),
        (DistributedOptimizer, "is_stub_optimizer"),
        (MegatronOptimizer, "init_state_fn"),
        (StepBatchsizeNumMicroBatchesCalculator, "schedule"),
        (StepBatchsizeNumMicroBatchesCalculator, "micro_batch_times_data_parallel_size"),
    ):
        if name not in owner.__init__.__code__.co_names:
            missing.append(f"{owner.__name__}.{name}")
    return missing


if missing := missing_names():
    raise ImportError(
        f"megatron-core {megatron.core.__version__} has no {', '.join(missing)}; "
        "ray_etc reads the optimizer's layout from them: install megatron-core 0.19"
    )


def leaf_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that hold parameters: one for each kind that Megatron chains (dense, experts)."""
    leaves = getattr(optimizer, "chained_optimizers", [optimizer])
    return [leaf for leaf in leaves if not getattr(leaf, "is_stub_optimizer", False)]


def is_for_experts(leaf: MegatronOptimizer) -> bool:
    """Whether `leaf` updates the experts' weights, which have one of their own where they are on their own mesh."""
    return any(group["is_expert_parallel"] for group in leaf.optimizer.param_groups)


def require_known_optimizer(leaf: MegatronOptimizer) -> None:
    """Raise ValueError for an optimizer whose state the adapter does not know how to find."""
    known = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)
    if not isinstance(leaf, known):
        raise ValueError(
            f"cannot find the state of a {type(leaf).__name__}; "
            f"use one of Megatron's {', '.join(kind.__name__ for kind in known)}"
        )
    if leaf.config.optimizer not in ("adam", "sgd"):
        raise ValueError(f"optimizer={leaf.config.optimizer!r}: only the state of 'adam' and 'sgd' can be moved")
    if leaf.config.use_precision_aware_optimizer:
        raise ValueError(
            "use_precision_aware_optimizer=True hides the main weights in Transformer Engine's own format; "
            "set it to False"
        )
    if leaf.config.optimizer_cpu_offload:
        raise ValueError(
            "optimizer_cpu_offload=True keeps main weights and moments in host memory, and a handover moves what is "
            "in the memory of the device; set it to False"
        )


def moment_names(leaf: MegatronOptimizer) -> tuple[str, ...]:
    """The tensors that the optimizer keeps for each parameter, beside the parameter itself."""
    if leaf.config.optimizer == "adam":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if leaf.config.sgd_momentum else ()


def gradient_buffers(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """What Megatron's DDP gathers gradients in. It sets them to zero at the start of each step."""
    return [
        buffer.grad_data
        for chunk in chunks
        for name in ("buffers", "expert_parallel_buffers")
        for buffer in _own_list(chunk, name)
    ]


def _own_list(chunk: torch.nn.Module, name: str) -> list[Any]:
    """DDP's list, which hides a method of every module that is called the same."""
    found = getattr(chunk, name, None)
    return found if isinstance(found, list) else []


def create_moments(leaf: MegatronOptimizer) -> None:
    """Make the zero moments that the optimizer would make in its first step; leave those that are there.

    Transformer Engine keeps the step count in its parameter groups; torch keeps one a parameter, beside the moments.
    """
    if leaf.init_state_fn is not None:
        leaf.init_state_fn(leaf.optimizer, leaf.config)
    for group in leaf.optimizer.param_groups:
        for param in group["params"]:
            state = leaf.optimizer.state[param]
            for name in moment_names(leaf):
                if state.get(name) is None:
                    state[name] = torch.zeros_like(param.data)
            if isinstance(leaf.optimizer, torch.optim.Adam):
                state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))


def owned_state(leaf: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, int, dict[str, torch.Tensor]]]:
    """For each parameter that `leaf` updates on this rank: the flat range that it owns, and the tensors for it.

    The tensors are "main_param" and the moments, each with as many elements as the range. Without a distributed
    optimizer the range is the whole parameter.
    """
    moments = moment_names(leaf)
    if isinstance(leaf, DistributedOptimizer):
        for buffer in leaf.gbuf_ranges:
            for buckets in buffer.values():
                for bucket in buckets:
                    for param, ranges in bucket["param_map"].items():
                        held = leaf._get_main_param_and_optimizer_states(param)
                        tensors = {"main_param": held["param"], **{name: held[name] for name in moments}}
                        yield param, ranges["param"].start, ranges["param"].end, tensors
        return
    mains = {}
    if isinstance(leaf, Float16OptimizerWithFloat16Params):
        for params, main_params in zip(leaf.float16_groups, leaf.fp32_from_float16_groups, strict=True):
            mains.update({main: param for param, main in zip(params, main_params, strict=True)})
    for group in leaf.optimizer.param_groups:
        for main in group["params"]:
            tensors = {"main_param": main, **{name: leaf.optimizer.state[main][name] for name in moments}}
            yield mains.get(main, main), 0, main.numel(), tensors


def microbatch_calculator() -> Any:
    """Megatron's, or None where none is set up."""
    return num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR


def batch_schedule(calculator: Any) -> list[tuple[int, int]]:
    """From how many samples seen which global batch is taken, in order; one where it is constant."""
    return getattr(calculator, "schedule", None) or [(0, calculator.get_current_running_global_batch_size())]


def samples_at_once(calculator: Any) -> int:
    """What one micro-batch of all replicas takes."""
    if isinstance(calculator, StepBatchsizeNumMicroBatchesCalculator):
        return calculator.micro_batch_times_data_parallel_size
    return calculator.get_current_running_global_batch_size() // calculator.get()


def adam_step(leaf: MegatronOptimizer) -> int:
    """How many updates Adam has made, for its bias correction."""
    steps = [state["step"] for state in leaf.optimizer.state.values() if "step" in state]
    steps += [group["step"] for group in leaf.optimizer.param_groups if "step" in group]
    return max((int(step) for step in steps), default=0)


def set_adam_step(leaf: MegatronOptimizer, step: int) -> None:
    if leaf.config.optimizer != "adam":
        return
    if isinstance(leaf.optimizer, torch.optim.Adam):
        # A tensor for each: without Transformer Engine, Megatron's checkpoint loader leaves one that all parameters
        # share, which torch then increments once a parameter.
        for state in leaf.optimizer.state.values():
            state["step"] = torch.full_like(state["step"], step)
    else:
        for group in leaf.optimizer.param_groups:
            group["step"] = step


# Checkpoints ---------------------------------------------------------------------------------------------------------


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


def load_optimizer_tensors(leaf: MegatronOptimizer, loaded: dict[str, Any]) -> None:
    """Copy what was loaded for `leaf`'s own `sharded_state_dict` into the memory that it trains with."""
    if isinstance(leaf, DistributedOptimizer):
        # With torch's Adam, Megatron looks for a "step" that this format does not have; None makes it skip a tensor.
        original = leaf._set_main_param_and_optimizer_states
        leaf._set_main_param_and_optimizer_states = lambda param, tensors: original(
            param, {"step": None, "param": None, **tensors}
        )
        try:
            leaf.load_parameter_state_from_fully_reshardable(loaded["param_state"])
        finally:
            del leaf._set_main_param_and_optimizer_states
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


def saved_step(saved: dict[str, Any]) -> int:
    """Adam's step count in what Megatron saved of an optimizer: beside the moments, or with ZeRO-1 in the groups."""
    inner = saved.get("optimizer", saved)
    counts = [group.get("step") for group in inner["param_groups"]] + [inner.get("state", {}).get("common_step")]
    return max((int(count) for count in counts if count is not None), default=0)
