"""From a configuration to a model in training, by Megatron-core's usual calls."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from ray_etc.actors.session import about_step, begin_stage, is_first_generation
from ray_etc.megatron import batches, cpu, mesh
from ray_etc.megatron.config import BatchConfig, GPTConfig, OptimizerSettings, check_parallel
from ray_etc.megatron.data import SampleLoader, open_tokens
from ray_etc.megatron.spec import local_block_spec
from ray_etc.megatron.state import state
from ray_etc.megatron.streams import seed_streams
from ray_etc.megatron.task import Task
from ray_etc.megatron.warm_up import warm_up
from ray_etc.planners.parallel import ParallelConfig

if TYPE_CHECKING:
    from ray.train import Checkpoint


def build(
    model: GPTConfig | Mapping[str, Any],
    parallel: ParallelConfig,
    *,
    optimizer: OptimizerSettings | Mapping[str, Any] | None = None,
    data: str | Path | None = None,
    global_batch_size: int | Mapping[int, int] = 32,
    micro_batch_size: int = 1,
    seed: int = 1234,
    checkpoint: str | Path | Checkpoint | None = None,
) -> Task:
    """Build a GPT under `parallel`, ready to train. Every rank of torch.distributed's default group calls it.

    In a generation that takes its state from another the weights are left unset until then, and a step on zeros is
    trained and undone where memory allows, so that the first one is as quick as any.

    Args:
        model: the shape of the model, as a GPTConfig or a mapping of its fields.
        parallel: how it is spread; its world size is that of the default group.
        optimizer: AdamW and its schedule, as OptimizerSettings or a mapping of its fields.
        data: a text file, a folder of text files, or the prefix of a Megatron `.bin`/`.idx` pair, read byte by byte
            or token by token; the sources of Python's standard library by default.
        global_batch_size: samples a step, over all ranks, whatever their number. To ramp it up, a mapping of samples
            seen to the batch from there on, as {0: 8, 1000: 16}.
        micro_batch_size: samples in one forward pass of one rank.
        seed: of the weights, the order of the samples, and dropout.
        checkpoint: what to start from, see `state`.
    """
    config = GPTConfig.of(model)
    batch = BatchConfig(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size)
    settings = OptimizerSettings.of(optimizer)
    check_parallel(config, batch, parallel)
    cpu.install()
    _initialize_parallel(parallel)
    # Before anything that takes time, so that a wrong path is reported at once.
    loader = SampleLoader(
        open_tokens(data),
        config.sequence_length,
        config.vocab_size,
        batch,
        data_index=parallel_state.get_data_parallel_rank(),
        data_parallel=parallel.data_parallel,
        seed=seed,
    )
    _initialize_microbatches(batch, parallel)
    if is_first_generation() and checkpoint is None:
        batches.require_shared(parallel, 0)
    elif not is_first_generation() and (step := about_step()) is not None:
        # Where the run will be soon: its state says exactly.
        at_once = batch.micro_batch_size * parallel.data_parallel
        loader.consumed_samples = batch.samples_before(step, at_once)
        batches.follow(loader.consumed_samples)
    seed_streams(seed, parallel_state.get_pipeline_model_parallel_rank())
    transformer = _transformer(config, parallel)
    chunks = [
        _wrap(_gpt(config, transformer, stage, parallel), parallel, is_first=stage in (None, 0))
        for stage in ([None] if mesh.virtual_stages(parallel) is None else range(parallel.virtual_pipeline))
    ]
    megatron_optimizer = get_megatron_optimizer(
        settings.to_megatron(config.dtype, distributed=parallel.distributed_optimizer), chunks
    )
    transformer.grad_scale_func = megatron_optimizer.scale_loss
    transformer.finalize_model_grads_func = finalize_model_grads
    scheduler = _scheduler(megatron_optimizer, settings)
    train_state = state(
        chunks,
        megatron_optimizer,
        scheduler=scheduler,
        loader=loader,
        vocab_size=config.vocab_size,
        check_parallel=partial(check_parallel, config, batch),
        seed=seed,
        checkpoint=checkpoint,
    )
    if checkpoint is not None and is_first_generation():
        batches.require_shared(parallel, loader.consumed_samples)
        _require_steps(scheduler, train_state.next_step)
    task = Task(config, batch, chunks, megatron_optimizer, scheduler, loader, train_state)
    if not is_first_generation() and about_step() is not None:
        begin_stage("warm_up")
        warm_up(task, parallel)
    return task


def _initialize_parallel(parallel: ParallelConfig) -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            "no process group: ray_etc's ranks have one; elsewhere call torch.distributed.init_process_group"
        )
    if dist.get_world_size() != parallel.world_size:
        raise ValueError(f"{parallel} needs {parallel.world_size} ranks; there are {dist.get_world_size()}")
    if parallel_state.model_parallel_is_initialized():
        if problem := mesh.difference(parallel):
            raise ValueError(f"Megatron is already set up in this process, with {problem}")
        return
    mesh.initialize(parallel)


def _initialize_microbatches(batch: BatchConfig, parallel: ParallelConfig) -> None:
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(
        rank=dist.get_rank(),
        global_batch_size=batch.ramp[-1][1],
        step_batch_size_schedule=" ".join(f"{n}:{size}" for n, size in batch.ramp) if len(batch.ramp) > 1 else None,
        micro_batch_size=batch.micro_batch_size,
        data_parallel_size=parallel.data_parallel,
    )


def _transformer(config: GPTConfig, parallel: ParallelConfig) -> TransformerConfig:
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=config.dropout,
        attention_dropout=config.dropout,
        **mesh.transformer_arguments(parallel, config.num_layers),
        **_experts(config),
        bf16=config.bf16,
        params_dtype=config.dtype,
        pipeline_dtype=config.dtype,
        attention_softmax_in_fp32=True,
        perform_initialization=is_first_generation(),
        # The fused kernels come with Apex and Transformer Engine; the local layers do without.
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )


def _experts(config: GPTConfig) -> dict[str, Any]:
    if config.num_moe_experts is None:
        return {}
    balanced_by_bias = config.moe_router_enable_expert_bias
    return {
        "num_moe_experts": config.num_moe_experts,
        "moe_ffn_hidden_size": config.moe_ffn_hidden_size,
        "moe_router_topk": config.moe_router_topk,
        "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_enable_expert_bias": balanced_by_bias,
        # The bias is a matter of sigmoid scores; Megatron refuses it with others.
        "moe_router_score_function": "sigmoid" if balanced_by_bias else "softmax",
        "moe_router_load_balancing_type": "none" if balanced_by_bias else "aux_loss",
        "moe_aux_loss_coeff": 0.0 if balanced_by_bias else config.moe_aux_loss_coeff,
    }


def _gpt(config: GPTConfig, transformer: TransformerConfig, stage: int | None, parallel: ParallelConfig) -> GPTModel:
    """A chunk of the model; `stage` is its number on this rank, None where it is the only one."""
    place = {} if stage is None else {"ignore_virtual": False, "vp_stage": stage}
    gpt = GPTModel(
        transformer,
        local_block_spec(transformer, stage),
        vocab_size=config.padded_vocab_size(parallel.tensor_parallel),
        max_sequence_length=config.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        parallel_output=True,
        share_embeddings_and_output_weights=config.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=config.rotary_base,
        vp_stage=stage,
    )
    _zero_padding(gpt, config)
    return gpt.to(torch.cuda.current_device())


@torch.no_grad()
def _zero_padding(gpt: GPTModel, config: GPTConfig) -> None:
    """Rows of the vocabulary's padding are zero from the start, and their gradients too, so they stay so.

    They are no part of the state that moves, so they must not be left as memory happened to be.
    """
    weights = []
    if gpt.pre_process:
        weights.append(gpt.embedding.word_embeddings.weight)
    if gpt.post_process and not (config.tied_embeddings and gpt.pre_process):
        weights.append(gpt.output_layer.weight)
    for weight in weights:
        first = parallel_state.get_tensor_model_parallel_rank() * weight.shape[0]
        weight[max(config.vocab_size - first, 0) :].zero_()


def _wrap(gpt: GPTModel, parallel: ParallelConfig, *, is_first: bool) -> DistributedDataParallel:
    module = Float16Module(gpt.config, gpt) if gpt.config.bf16 else gpt
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=parallel.distributed_optimizer,
        grad_reduce_in_fp32=True,
    )
    # Megatron's own script cuts only the gradients of the first chunk into buckets.
    return DistributedDataParallel(gpt.config, ddp, module, disable_bucketing=not is_first)


def _scheduler(optimizer: Any, settings: OptimizerSettings) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if settings.warmup_steps else settings.lr,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=settings.decay_steps or settings.warmup_steps + 1,
        lr_decay_style="constant" if settings.decay_steps is None else settings.decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )


def _require_steps(scheduler: OptimizerParamScheduler, steps: int) -> None:
    """Raise ValueError for a checkpoint whose scheduler counts something else than steps."""
    if scheduler.num_steps != steps:
        raise ValueError(
            f"the checkpoint has {steps} steps behind it, but its learning rate is at {scheduler.num_steps}: "
            "Megatron's script counts samples there, build counts steps; load it with a model and a scheduler of your "
            "own, by ray_etc.megatron.state(..., checkpoint=...)"
        )
