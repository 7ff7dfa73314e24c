"""A parallel configuration in Megatron's own words."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state

from ray_etc.planners.parallel import ParallelConfig


def initialize(parallel: ParallelConfig, **more: Any) -> None:
    """Make Megatron's process groups. Every rank of torch.distributed's default group calls it, once."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_parallel,
        pipeline_model_parallel_size=parallel.pipeline_parallel,
        virtual_pipeline_model_parallel_size=virtual_stages(parallel),
        context_parallel_size=parallel.context_parallel,
        expert_model_parallel_size=parallel.expert_parallel,
        expert_tensor_parallel_size=parallel.tensor_parallel_of_experts,
        **more,
    )


def current() -> ParallelConfig:
    """The axes of the process groups that Megatron has."""
    return ParallelConfig(
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
        context_parallel=parallel_state.get_context_parallel_world_size(),
        expert_parallel=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel=parallel_state.get_expert_tensor_parallel_world_size(),
    )


def difference(parallel: ParallelConfig) -> str | None:
    """Where the process groups that Megatron has are not those of `parallel`, in words."""
    there = {
        "tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_parallel": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel": parallel_state.get_context_parallel_world_size(),
        "expert_parallel": parallel_state.get_expert_model_parallel_world_size(),
        "tensor_parallel_of_experts": parallel_state.get_expert_tensor_parallel_world_size(),
        "virtual_pipeline": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
    }
    unlike = [
        f"{axis}={size}, not {getattr(parallel, axis)}"
        for axis, size in there.items()
        if size != getattr(parallel, axis)
    ]
    return ", ".join(unlike) or None


def transformer_arguments(parallel: ParallelConfig, num_layers: int, mtp_layers: int = 0) -> dict[str, Any]:
    """The arguments of a TransformerConfig that say how it is spread.

    Raises ValueError where `pipeline_layers` are not the layers of the model.
    """
    return {
        "tensor_model_parallel_size": parallel.tensor_parallel,
        "pipeline_model_parallel_size": parallel.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": virtual_stages(parallel),
        # In one batch, messages of two stages to each other would be taken for one another: with interleaved chunks a
        # stage sends to the next and to the one before at once, and of two stages those are the same.
        "overlap_p2p_comm": parallel.virtual_pipeline > 1,
        "batch_p2p_comm": parallel.virtual_pipeline == 1,
        "pipeline_model_parallel_layout": _layout(parallel, num_layers, mtp_layers),
        "context_parallel_size": parallel.context_parallel,
        "expert_model_parallel_size": parallel.expert_parallel,
        "expert_tensor_parallel_size": parallel.tensor_parallel_of_experts,
        # Without tensor parallelism there is nothing to split the sequence over, and Megatron refuses to be asked.
        "sequence_parallel": parallel.sequence_parallel and parallel.tensor_parallel > 1,
    }


def virtual_stages(parallel: ParallelConfig) -> int | None:
    """Model chunks a stage as Megatron wants them: None for one."""
    return parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None


def _layout(parallel: ParallelConfig, num_layers: int, mtp_layers: int) -> list[list[str]] | None:
    """The layers of each virtual stage, or None where they are as many in each, which is what Megatron does unasked."""
    layers = parallel.layers_of_virtual_stages(num_layers)
    if len(set(layers)) == 1:
        return None
    stages = [["decoder"] * count for count in layers]
    stages[0].insert(0, "embedding")
    stages[-1] += ["mtp"] * mtp_layers + ["loss"]
    return stages
