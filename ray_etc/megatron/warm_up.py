"""One step before the first, so that what is done only once is done while the old generation still trains.

That is: connections of the process groups, handles and workspaces of the GPU libraries, kernels that are loaded or
compiled at their first use, modules imported inside functions, the order of the samples and the pages that hold them.

The running generation pays for it: while it trains, each kernel of another process on its GPU takes 0.15 to 0.2 ms from
it, since the GPU changes between the two. So the step runs through one layer, updates few parameters, and its zeros are
written by few kernels.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.transformer_block import TransformerBlock

from ray_etc.actors.small_state import SmallState, load_small_state
from ray_etc.megatron import compat
from ray_etc.megatron.task import Task
from ray_etc.planners.parallel import ParallelConfig

logger = logging.getLogger(__name__)

ROOM = 2
"""Warm up where so many times the memory of a step's activations is free: the running generation uses it, too."""


def warm_up(task: Task, parallel: ParallelConfig) -> bool:
    """Train a step on zeros and undo it. All ranks of a generation call it, before its state arrives.

    Zeros, since memory that nothing has written may hold NaN, which would spread to what no move overwrites: the
    padding. From weights of zero come gradients of zero, so weights and moments are zero afterwards, as is the padding.
    The small state, the model's buffers and the gradients are left as they were.

    Returns:
        False where some rank's GPU has no room for it, and nothing was done.
    """
    if not _has_room(task, parallel):
        logger.info("no warm-up step: too little GPU memory is free beside the running generation")
        return False
    small = SmallState.of(task.state)
    buffers = [(buffer, buffer.clone()) for chunk in task.chunks for buffer in chunk.module.buffers()]
    views = [view.detach() for view in task.state.views()]
    for dtype in {view.dtype for view in views}:
        torch._foreach_zero_([view for view in views if view.dtype == dtype])
    with _one_layer(task), _one_update(task):
        # As few as every stage of a pipeline needs for its work: the others would load nothing that is not there.
        metrics = task.train_on(min(parallel.pipeline_parallel, get_num_microbatches()))
    if not math.isfinite(metrics["loss"] + metrics["grad_norm"]):
        raise RuntimeError(
            f"the warm-up step on weights of zero made {metrics}: it would spoil the vocabulary's padding"
        )
    for buffer, before in buffers:
        buffer.copy_(before)
    for chunk in task.chunks:
        chunk.zero_grad_buffer()
    task.optimizer.zero_grad()
    coordinate = parallel.coordinate(dist.get_rank())
    load_small_state(task.state, small.replicated, {coordinate: small.streams}, coordinate, step=0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the move needs room, too
    return True


@contextmanager
def _one_layer(task: Task) -> Iterator[None]:
    """Within, each chunk is as deep as that: its layers are alike, and more would load nothing that is not there."""
    blocks = [part for chunk in task.chunks for part in chunk.modules() if isinstance(part, TransformerBlock)]
    layers = [block.layers for block in blocks]
    for block in blocks:
        block.layers = block.layers[:1]
    try:
        yield
    finally:
        for block, whole in zip(blocks, layers, strict=True):
            block.layers = whole


@contextmanager
def _one_update(task: Task) -> Iterator[None]:
    """Within, the optimizers know one parameter of each of their groups: the others would only take time and memory."""
    groups = [group for leaf in compat.leaf_optimizers(task.optimizer) for group in leaf.optimizer.param_groups]
    params = [group["params"] for group in groups]
    for group in groups:
        group["params"] = group["params"][:1]
    try:
        yield
    finally:
        for group, whole in zip(groups, params, strict=True):
            group["params"] = whole


def _has_room(task: Task, parallel: ParallelConfig) -> bool:
    """The same answer on every rank, since a step takes them all."""
    if not torch.cuda.is_available():
        return True
    free, total = torch.cuda.mem_get_info()
    own = torch.cuda.get_per_process_memory_fraction() * total - torch.cuda.memory_reserved()
    lacks = torch.tensor(float(min(free, own) < ROOM * activations_nbytes(task, parallel)), device="cuda")
    dist.all_reduce(lacks, op=dist.ReduceOp.MAX)
    return not lacks.item()


def activations_nbytes(task: Task, parallel: ParallelConfig) -> int:
    """At most so much a rank of one layer a chunk keeps between forward and backward.

    That is without flash attention or recomputation.

    After Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*.
    """
    config, batch = task.config, task.batch
    tokens = batch.micro_batch_size * config.sequence_length
    heads = config.num_attention_heads * config.sequence_length
    layer = 20 * config.hidden_size + (6 * config.ffn_hidden_size + 5 * heads) // parallel.tensor_parallel
    if config.num_moe_experts is not None:
        # A router of zeros sends every token of all expert-parallel ranks to the same few experts, maybe all here.
        expert = 4 * config.hidden_size + 6 * config.moe_ffn_hidden_size
        layer += parallel.expert_parallel * config.moe_router_topk * expert
    in_flight = parallel.pipeline_parallel  # micro-batches, on the first stage
    logits = 4 * config.padded_vocab_size(parallel.tensor_parallel) // parallel.tensor_parallel
    return tokens * (in_flight * len(task.chunks) * layer * config.dtype.itemsize + logits * torch.float32.itemsize)
