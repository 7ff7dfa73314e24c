"""Megatron's own training script, as far as it writes and reads checkpoints."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model
from megatron.training import checkpointing

from ray_etc.megatron import corrections, mesh

Task = Any
"""A `ray_etc.megatron.Task` or a `Trainee`."""


class Arguments(Namespace):
    """The script's arguments; those that do not matter here are off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def save_by_script(task: Task, folder: Path, iteration: int) -> None:
    """What `--save` does."""
    corrections.collect_results_of_saves_here()
    with _arguments(task, save=str(folder)):
        checkpointing.save_checkpoint(iteration, task.chunks, task.optimizer, task.scheduler, 0)


def load_by_script(task: Task, folder: Path) -> tuple[int, int]:
    """What `--load` does; the iteration, and how many samples were consumed."""
    with _arguments(task, load=str(folder)) as arguments:
        iteration, _ = checkpointing.load_checkpoint(task.chunks, task.optimizer, task.scheduler)
        return iteration, arguments.consumed_train_samples


@contextmanager
def _arguments(task: Task, **more: Any) -> Iterator[Namespace]:
    parallel, config = mesh.current(), task.chunks[0].config
    model: Any = unwrap_model(task.chunks[0])
    given = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "add_position_embedding": True,
        "hybrid_layer_pattern": getattr(model, "hybrid_layer_pattern", None),
        "tensor_model_parallel_size": parallel.tensor_parallel,
        "pipeline_model_parallel_size": parallel.pipeline_parallel,
        "context_parallel_size": parallel.context_parallel,
        "expert_model_parallel_size": parallel.expert_parallel,
        "expert_tensor_parallel_size": parallel.tensor_parallel_of_experts,
        "data_parallel_size": parallel.data_parallel,
        "world_size": parallel.world_size,
        "consumed_train_samples": task.state.replicated["loader"].state_dict()["consumed_samples"],
        "use_distributed_optimizer": task.chunks[0].ddp_config.use_distributed_optimizer,
        "dist_ckpt_optim_fully_reshardable": True,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "ckpt_format": "torch_dist",
        "use_dist_ckpt": True,
        "auto_detect_ckpt_format": True,
        "ckpt_fully_parallel_save": True,
        "ckpt_fully_parallel_save_process_group": "dp",
        "ckpt_load_validate_sharding_integrity": True,
        "dist_ckpt_strictness": "raise_unexpected",
        "async_save": False,
        "verify_integrity": False,
        "bf16": config.bf16,
        **more,
    }
    # What is written has to be a plain Namespace; what is asked for beyond it is off.
    saved, arguments = Namespace(**given), Arguments(**given)
    original = checkpointing.generate_state_dict

    def generate(_: Namespace, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**original(arguments, *args, **kwargs), "args": saved}

    set_tensors = DistributedOptimizer._set_main_param_and_optimizer_states
    with (
        patch.object(checkpointing, "get_args", lambda: arguments),
        patch.object(checkpointing, "generate_state_dict", generate),
        # Without Transformer Engine Megatron looks for a step beside each parameter's moments, which are saved without.
        patch.object(
            DistributedOptimizer,
            "_set_main_param_and_optimizer_states",
            lambda leaf, param, tensors: set_tensors(leaf, param, {"step": None, "param": None, **tensors}),
        ),
    ):
        yield arguments
