"""What to train and how, as frozen values, and the check that a parallel configuration can hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Self

import torch
from megatron.core.optimizer import OptimizerConfig

from ray_etc.actors.errors import BatchNotShared
from ray_etc.choice import require_trainable
from ray_etc.planners.parallel import ParallelConfig


class _FromMapping:
    @classmethod
    def of(cls, value: Self | Mapping[str, Any] | None) -> Self:
        """`value` as it is, or made from a mapping of its fields."""
        if isinstance(value, cls):
            return value
        given = dict(value or {})  # type: ignore[arg-type]
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"{cls.__name__} has no {', '.join(unknown)}; it has {', '.join(known)}")
        return cls(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig(_FromMapping):
    """A Llama-shaped GPT: RMSNorm, SwiGLU, grouped-query attention and rotary positions, without biases.

    With `num_moe_experts` each layer has so many experts in place of its MLP, as in Mixtral or DeepSeek: of
    `moe_ffn_hidden_size` each, `moe_router_topk` for a token, balanced by an auxiliary loss or, where
    `moe_router_enable_expert_bias` is set, by a bias of the router; and `moe_shared_expert_intermediate_size` for all.
    """

    num_layers: int = 4
    hidden_size: int = 128
    ffn_hidden_size: int = 352
    num_attention_heads: int = 8
    num_query_groups: int = 4
    vocab_size: int = 256
    sequence_length: int = 128
    tied_embeddings: bool = False
    bf16: bool = False
    dropout: float = 0.0
    rotary_base: int = 10000
    norm_epsilon: float = 1e-5
    num_moe_experts: int | None = None
    moe_ffn_hidden_size: int = 128
    moe_router_topk: int = 2
    moe_aux_loss_coeff: float = 1e-2
    moe_router_enable_expert_bias: bool = False
    moe_shared_expert_intermediate_size: int | None = None

    def __post_init__(self) -> None:
        _require_multiple(self, "hidden_size", "num_attention_heads")
        _require_multiple(self, "num_attention_heads", "num_query_groups")
        if self.head_size % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} over num_attention_heads={self.num_attention_heads} makes heads of "
                f"{self.head_size}; rotary positions need an even size"
            )
        if self.num_moe_experts is not None and not 1 <= self.moe_router_topk <= self.num_moe_experts:
            raise ValueError(
                f"moe_router_topk={self.moe_router_topk} of num_moe_experts={self.num_moe_experts}; use 1 to "
                f"{self.num_moe_experts}"
            )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """The vocabulary with enough unused rows that every tensor-parallel rank holds as many."""
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings(_FromMapping):
    """AdamW and its learning rate: a linear warm-up, then a decay to `min_lr`, or constant without `decay_steps`."""

    lr: float = 1e-3
    min_lr: float = 1e-5
    warmup_steps: int = 0
    decay_steps: int | None = None
    decay_style: str = "cosine"
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is above lr={self.lr}")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps={self.decay_steps} must be more than warmup_steps={self.warmup_steps}")

    def to_megatron(self, dtype: torch.dtype, *, distributed: bool) -> OptimizerConfig:
        return OptimizerConfig(
            optimizer="adam",
            lr=self.lr,
            min_lr=self.min_lr,
            weight_decay=self.weight_decay,
            clip_grad=self.clip_grad,
            adam_beta1=self.adam_beta1,
            adam_beta2=self.adam_beta2,
            adam_eps=self.adam_eps,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """How many samples make one step, over all ranks, and how many one forward pass of one rank.

    To ramp the steps up, `global_batch_size` maps samples seen to the batch from there on, as {0: 8, 1000: 16}.
    """

    global_batch_size: int | Mapping[int, int]
    micro_batch_size: int = 1

    def __post_init__(self) -> None:
        if 0 not in dict(self.ramp):
            raise ValueError(f"global_batch_size={self.global_batch_size} does not say the first batch; begin at 0")
        for _, size in self.ramp:
            if self.micro_batch_size < 1 or size < 1 or size % self.micro_batch_size:
                raise ValueError(
                    f"global_batch_size={size} must be a multiple of micro_batch_size={self.micro_batch_size}"
                )

    @property
    def ramp(self) -> list[tuple[int, int]]:
        """From how many samples seen which batch is taken, in order."""
        given = self.global_batch_size
        return sorted(given.items()) if isinstance(given, Mapping) else [(0, given)]

    def size_after(self, samples: int) -> int:
        """The global batch of the step that begins when so many samples have been seen."""
        return next(size for threshold, size in reversed(self.ramp) if samples >= threshold)

    def samples_before(self, step: int, at_once: int) -> int:
        """How many samples a run has seen before that step; more where it is at a batch that is no multiple of
        `at_once`: then as many as end that part of the ramp."""
        samples, least = 0, 0
        for (_, size), (until, _) in pairwise(self.ramp):
            least = until if size % at_once else least
            steps = min(step, max(0, -(-(until - samples) // size)))
            samples, step = samples + steps * size, step - steps
        return max(samples + step * self.ramp[-1][1], least)


def check_parallel(model: GPTConfig, batch: BatchConfig, parallel: ParallelConfig) -> None:
    """Raise ValueError, with the numbers and the remedy, where `parallel` cannot train `model`.

    BatchNotShared where it is only the number of replicas that is wrong.
    """
    require_trainable(parallel)
    tensor, data = parallel.tensor_parallel, parallel.data_parallel
    heads, groups = model.num_attention_heads, model.num_query_groups
    _require_divisor("num_attention_heads", heads, "tensor_parallel", tensor)
    _require_divisor("ffn_hidden_size", model.ffn_hidden_size, "tensor_parallel", tensor)
    if groups % tensor and tensor % groups:
        usable = [n for n in _divisors(heads) if groups % n == 0 or n % groups == 0]
        raise ValueError(
            f"num_query_groups={groups} and tensor_parallel={tensor}: one must divide the other; use {_choices(usable)}"
        )
    _check_experts(model, parallel)
    _check_sequence(model, parallel)
    # The last of a ramp: whether the others are still to come is for `batches.require_shared` to say.
    size = batch.ramp[-1][1]
    micro_batches = size // batch.micro_batch_size
    if micro_batches % data:
        raise BatchNotShared(
            f"global_batch_size={size} is {micro_batches} batches of "
            f"micro_batch_size={batch.micro_batch_size}, which data_parallel={data} cannot share equally; "
            f"use data_parallel={_choices(_divisors(micro_batches))}, or a global batch that is a multiple of "
            f"{batch.micro_batch_size * data}",
            _divisors(micro_batches),
        )
    _check_stages(model, parallel, micro_batches)


def _check_experts(model: GPTConfig, parallel: ParallelConfig) -> None:
    experts, of_experts = model.num_moe_experts, parallel.tensor_parallel_of_experts
    if experts is None:
        if parallel.has_expert_mesh:
            raise ValueError(
                f"expert_parallel={parallel.expert_parallel}, expert_tensor_parallel={of_experts}, but the model has "
                "no experts; give it num_moe_experts, or leave them out"
            )
        return
    _require_divisor("num_moe_experts", experts, "expert_parallel", parallel.expert_parallel)
    _require_divisor("moe_ffn_hidden_size", model.moe_ffn_hidden_size, "expert_tensor_parallel", of_experts)
    if shared := model.moe_shared_expert_intermediate_size:
        _require_divisor("moe_shared_expert_intermediate_size", shared, "tensor_parallel", parallel.tensor_parallel)
    if parallel.tensor_parallel > 1 and not parallel.sequence_parallel:
        raise ValueError(
            f"num_moe_experts={experts} with tensor_parallel={parallel.tensor_parallel}: Megatron trains experts under "
            "tensor parallelism with sequence_parallel=True only; set it"
        )


def _check_sequence(model: GPTConfig, parallel: ParallelConfig) -> None:
    # The ranks of a context each hold two chunks, one from either end.
    chunks = 2 * parallel.context_parallel if parallel.context_parallel > 1 else 1
    length = model.sequence_length
    if length % chunks:
        usable = [n for n in _divisors(length) if n == 1 or length % (2 * n) == 0]
        raise ValueError(
            f"sequence_length={length} cannot be split by 2 x context_parallel={parallel.context_parallel} = {chunks}; "
            f"use context_parallel={_choices(usable)}"
        )
    if parallel.sequence_parallel:
        length = model.sequence_length // parallel.context_parallel
        name = "sequence_length" if chunks == 1 else "sequence_length / context_parallel"
        _require_divisor(name, length, "tensor_parallel", parallel.tensor_parallel)


def _check_stages(model: GPTConfig, parallel: ParallelConfig, micro_batches: int) -> None:
    stages, chunks = parallel.pipeline_parallel, parallel.virtual_pipeline
    if parallel.pipeline_layers is not None:
        layers = parallel.layers_of_virtual_stages(model.num_layers)  # ValueError where they are not the model's
        for stage in range(1, stages - 1):
            if not any(layers[stage::stages]):
                raise ValueError(
                    f"pipeline_layers={parallel.pipeline_layers} leaves nothing to stage {stage}; give each stage "
                    "between the first and the last a layer"
                )
    elif chunks == 1:
        _require_divisor("num_layers", model.num_layers, "pipeline_parallel", stages)
    else:
        _require_divisor("num_layers", model.num_layers, "pipeline_parallel x virtual_pipeline", stages * chunks)
    of_replica = micro_batches // parallel.data_parallel
    if chunks > 1 and of_replica % stages:
        raise BatchNotShared(
            f"{of_replica} micro-batches a replica cannot be interleaved over pipeline_parallel={stages} stages of "
            f"virtual_pipeline={chunks} chunks; use a multiple of {stages} micro-batches",
            [number for number in _divisors(micro_batches) if micro_batches // number % stages == 0],
        )


def _require_divisor(name: str, value: int, axis: str, size: int) -> None:
    if value % size:
        raise ValueError(f"{name}={value} cannot be split by {axis}={size}; use {_choices(_divisors(value))}")


def _require_multiple(config: Any, name: str, of: str) -> None:
    value, divisor = getattr(config, name), getattr(config, of)
    if divisor < 1 or value < 1 or value % divisor:
        raise ValueError(f"{name}={value} must be a multiple of {of}={divisor}")


def _divisors(value: int) -> list[int]:
    return [n for n in range(1, value + 1) if value % n == 0]


def _choices(numbers: list[int]) -> str:
    *first, last = [str(number) for number in numbers]
    return f"{', '.join(first)} or {last}" if first else last
