"""From a configuration to a model in training, by Megatron-core's usual calls."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

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

from ray_etc.actors.session import about_step, is_first_generation
from ray_etc.megatron import cpu
from ray_etc.megatron.config import BatchConfig, GPTConfig, OptimizerSettings, check_parallel
from ray_etc.megatron.data import SampleLoader, open_tokens
from ray_etc.megatron.spec import local_block_spec
from ray_etc.megatron.state import state
from ray_etc.megatron.streams import seed_streams
from ray_etc.megatron.task import Task
from ray_etc.megatron.warm_up import warm_up
from ray_etc.planners.parallel import ParallelConfig


def build(
    model: GPTConfig | Mapping[str, Any],
    parallel: ParallelConfig,
    *,
    optimizer: OptimizerSettings | Mapping[str, Any] | None = None,
    data: str | Path | None = None,
    global_batch_size: int = 32,
    micro_batch_size: int = 1,
    seed: int = 1234,
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
        global_batch_size: samples a step, over all ranks; never changes in a run.
        micro_batch_size: samples in one forward pass of one rank.
        seed: of the weights, the order of the samples, and dropout.
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
    seed_streams(seed, parallel_state.get_pipeline_model_parallel_rank())
    module = _wrap(_gpt(config, parallel), parallel)
    megatron_optimizer = get_megatron_optimizer(
        settings.to_megatron(config.dtype, distributed=parallel.distributed_optimizer), [module]
    )
    module.config.grad_scale_func = megatron_optimizer.scale_loss
    module.config.finalize_model_grads_func = finalize_model_grads
    scheduler = _scheduler(megatron_optimizer, settings)
    train_state = state(
        module,
        megatron_optimizer,
        scheduler=scheduler,
        loader=loader,
        vocab_size=config.vocab_size,
        check_parallel=partial(check_parallel, config, batch),
        seed=seed,
    )
    task = Task(config, batch, module, megatron_optimizer, scheduler, loader, train_state)
    if not is_first_generation():
        warm_up(task, parallel, about_step())
    return task


def _initialize_parallel(parallel: ParallelConfig) -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            "no process group: ray_etc's ranks have one; elsewhere call torch.distributed.init_process_group"
        )
    if dist.get_world_size() != parallel.world_size:
        raise ValueError(f"{parallel} needs {parallel.world_size} ranks; there are {dist.get_world_size()}")
    if parallel_state.model_parallel_is_initialized():
        there = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        if there != (parallel.tensor_parallel, parallel.pipeline_parallel):
            raise ValueError(
                f"Megatron is already set up for TP{there[0]} PP{there[1]} in this process, not {parallel}"
            )
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_parallel,
        pipeline_model_parallel_size=parallel.pipeline_parallel,
    )


def _initialize_microbatches(batch: BatchConfig, parallel: ParallelConfig) -> None:
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(
        rank=dist.get_rank(),
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.micro_batch_size,
        data_parallel_size=parallel.data_parallel,
    )


def _gpt(config: GPTConfig, parallel: ParallelConfig) -> GPTModel:
    transformer = TransformerConfig(
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
        tensor_model_parallel_size=parallel.tensor_parallel,
        pipeline_model_parallel_size=parallel.pipeline_parallel,
        # Without tensor parallelism there is nothing to split the sequence over, and Megatron refuses to be asked.
        sequence_parallel=parallel.sequence_parallel and parallel.tensor_parallel > 1,
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
    gpt = GPTModel(
        transformer,
        local_block_spec(config.num_layers // parallel.pipeline_parallel),
        vocab_size=config.padded_vocab_size(parallel.tensor_parallel),
        max_sequence_length=config.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=config.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=config.rotary_base,
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


def _wrap(gpt: GPTModel, parallel: ParallelConfig) -> DistributedDataParallel:
    module = Float16Module(gpt.config, gpt) if gpt.config.bf16 else gpt
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=parallel.distributed_optimizer,
        grad_reduce_in_fp32=True,
    )
    return DistributedDataParallel(gpt.config, ddp, module)


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
