"""What the adapter reads of Megatron-core under private names, and a probe that says which of them are missing.

What Megatron mistakes is put right in corrections.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import megatron.core
import torch
from megatron.core import num_microbatches_calculator
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer, MegatronOptimizer

ADAM = ("exp_avg", "exp_avg_sq")
MOMENTS = {
    "Adam": ADAM,
    "AdamW": ADAM,
    "FusedAdam": ADAM,
    "SGD": ("momentum_buffer",),
    "FusedSGD": ("momentum_buffer",),
    "Lion": ("exp_avg",),
    "TensorParallelMuon": ("momentum_buffer",),
}
"""What each class of optimizer that Megatron wraps keeps for a parameter. By name: they come from several packages."""

UNSCALED = (torch.float32, torch.bfloat16)
"""What Transformer Engine's Adam keeps as it is; float16 and 8 bits it multiplies with a scale for each tensor."""


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
        (DistributedOptimizer, "model_param_group_index_map"),
        (DistributedOptimizer, "model_fp32_groups"),
        (DistributedOptimizer, "model_float16_groups"),
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


def require_known_optimizers(optimizer: MegatronOptimizer) -> None:
    """Raise ValueError for an optimizer whose state the adapter does not know how to find."""
    for part in (optimizer, *leaf_optimizers(optimizer)):
        if isinstance(part, LayerWiseDistributedOptimizer):
            raise ValueError(
                "a LayerWiseDistributedOptimizer deals whole weights out to the replicas, and its state cannot be "
                "found yet; set use_layer_wise_distributed_optimizer=False"
            )
    leaves = leaf_optimizers(optimizer)
    if not leaves:
        # A rank whose own weights are all frozen has one all the same: Megatron makes the same groups on every rank.
        raise ValueError("the optimizer has nothing to update: every weight is frozen; leave one trainable")
    for leaf in leaves:
        _require_known(leaf)


def _require_known(leaf: MegatronOptimizer) -> None:
    known = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)
    if not isinstance(leaf, known):
        raise ValueError(
            f"cannot find the state of a {type(leaf).__name__}; "
            f"use one of Megatron's {', '.join(kind.__name__ for kind in known)}"
        )
    if leaf.config.use_distributed_optimizer and not isinstance(leaf, DistributedOptimizer):
        # Each replica gets a part of the gradients, and would update all of its weights.
        raise ValueError(
            f"use_distributed_optimizer=True, but optimizer={leaf.config.optimizer!r} is a {type(leaf).__name__}, "
            "under which replicas would drift apart; set it to False, in the optimizer and in DDP"
        )
    if leaf.config.use_precision_aware_optimizer:
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            dtype = getattr(leaf.config, name)
            if dtype not in UNSCALED:
                raise ValueError(
                    f"{name}={dtype} is kept as multiples of a scale, one for each rank's part of a tensor, and other "
                    "parts would need other scales, which changes the values; use torch.float32 or torch.bfloat16"
                )
    if leaf.config.optimizer_cpu_offload:
        # Without a GPU it cannot make a step: it looks for the copy on the GPU of each tensor that is on none.
        raise ValueError(
            "optimizer_cpu_offload=True keeps main weights and moments in host memory, and a handover moves what is "
            "in the memory of the device; set it to False"
        )
    if (name := type(leaf.optimizer).__name__) not in MOMENTS:
        raise ValueError(f"cannot find the state of a {name}; it is known of {', '.join(MOMENTS)}")


def moment_names(leaf: MegatronOptimizer) -> tuple[str, ...]:
    """The tensors that the optimizer keeps for each parameter, beside the parameter itself."""
    names = MOMENTS[type(leaf.optimizer).__name__]
    has_none = "SGD" in type(leaf.optimizer).__name__ and not leaf.config.sgd_momentum
    return () if has_none else names


def gradient_buffers(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """What Megatron's DDP gathers gradients in. It sets them to zero at the start of each step."""
    return [
        buffer.grad_data
        for chunk in chunks
        for name in ("buffers", "expert_parallel_buffers")
        for buffer in _own_list(chunk, name)
    ]


def weights_gathered_later(chunks: Sequence[torch.nn.Module]) -> set[torch.nn.Parameter]:
    """Those of which, between two steps, a rank has only what it has updated itself: `overlap_param_gather`."""
    return {param for chunk in _that_gather_later(chunks) for param in chunk.param_to_bucket_group}


@torch.no_grad()
def gather_weights(chunks: Sequence[torch.nn.Module], *, unless_by_forward: bool = False) -> None:
    """Gather now what would be gathered in the next forward pass, which then does not. All ranks call it at once.

    Megatron's script does so before it saves. It also turns the hooks that gather off for its first step, for which
    all ranks are taken to have all weights: `unless_by_forward` is for where they are on.
    """
    for chunk in _that_gather_later(chunks):
        if not (unless_by_forward and chunk.remove_forward_pre_hook_handles):
            chunk.start_param_sync(force_sync=True)


def _that_gather_later(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    return [chunk for chunk in chunks if getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False)]


def _own_list(chunk: torch.nn.Module, name: str) -> list[Any]:
    """DDP's list, which hides a method of every module that is called the same."""
    found = getattr(chunk, name, None)
    return found if isinstance(found, list) else []


def create_moments(leaf: MegatronOptimizer) -> None:
    """Make the zero moments that the optimizer would make in its first step; leave those that are there.

    Transformer Engine keeps the step count in its parameter groups; torch keeps one a parameter, beside the moments.
    """
    if leaf.config.use_precision_aware_optimizer:
        _create_state_of_chosen_precision(leaf.optimizer)
    elif leaf.init_state_fn is not None:
        leaf.init_state_fn(leaf.optimizer, leaf.config)
    for group in leaf.optimizer.param_groups:
        for param in group["params"]:
            state = leaf.optimizer.state[param]
            for name in moment_names(leaf):
                if state.get(name) is None:
                    state[name] = torch.zeros_like(param.data)
            if isinstance(leaf.optimizer, torch.optim.Adam):
                state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))


def _create_state_of_chosen_precision(optimizer: Any) -> None:
    """As Transformer Engine's Adam does in its first step; Megatron's own way calls it without its second argument."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not optimizer.state[param]:
                optimizer.initialize_state(param, optimizer.store_param_remainders and param.dtype == torch.bfloat16)
            if "master_param" in optimizer.state[param] and param.dtype == torch.float32:
                # It makes a main weight of these, too, and then never updates it.
                optimizer.state[param]["master_param"] = param.detach()


Owned = tuple[torch.nn.Parameter, int, int, dict[str, torch.Tensor]]


def owned_state(leaf: MegatronOptimizer) -> Iterator[Owned]:
    """For each parameter that `leaf` updates on this rank: the flat range that it owns, and the tensors for it.

    The tensors are "main_param" and the moments, each with as many elements as the range. Without a distributed
    optimizer the range is the whole parameter. In place of "main_param" there may be "main_param_remainder": the
    16 bits that a main weight has more than its bf16 weight.
    """
    if isinstance(leaf, DistributedOptimizer):
        for buffer in leaf.gbuf_ranges:
            for buckets in buffer.values():
                for bucket in buckets:
                    for param, ranges in bucket["param_map"].items():
                        yield param, ranges["param"].start, ranges["param"].end, _held(leaf, of_optimizer(leaf, param))
        return
    mains = {}
    if isinstance(leaf, Float16OptimizerWithFloat16Params):
        for params, main_params in zip(leaf.float16_groups, leaf.fp32_from_float16_groups, strict=True):
            mains.update({main: param for param, main in zip(params, main_params, strict=True)})
    for group in leaf.optimizer.param_groups:
        for main in group["params"]:
            yield mains.get(main, main), 0, main.numel(), _held(leaf, main)


def of_optimizer(leaf: DistributedOptimizer, param: torch.nn.Parameter) -> torch.Tensor:
    """What the optimizer inside updates in place of this rank's range of a parameter."""
    group, position = leaf.model_param_group_index_map[param]
    held: torch.Tensor = leaf.optimizer.param_groups[group]["params"][position]
    return held


def _held(leaf: MegatronOptimizer, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the optimizer holds for one of its parameters, as it holds it: Megatron's own way gives copies of some."""
    state = leaf.optimizer.state[param]
    main = state.get("master_param", param)
    kind = "main_param_remainder" if main.dtype == torch.int16 else "main_param"
    return {kind: main, **{name: state[name] for name in moment_names(leaf)}}


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
    if moment_names(leaf) != ADAM:
        return
    if isinstance(leaf.optimizer, torch.optim.Adam):
        # A tensor for each: without Transformer Engine, Megatron's checkpoint loader leaves one that all parameters
        # share, which torch then increments once a parameter.
        for state in leaf.optimizer.state.values():
            state["step"] = torch.full_like(state["step"], step)
    else:
        for group in leaf.optimizer.param_groups:
            group["step"] = step


def tell_of_tries(leaf: MegatronOptimizer, tell: Callable[[], None]) -> None:
    """Call `tell` at the beginning of each update, which may come to nothing before the optimizer inside is called."""
    prepare = leaf.prepare_grads

    def told() -> bool:
        tell()
        return prepare()

    leaf.prepare_grads = told
