"""The transitions that are proven, as data: models over axes and optimizers. Each is run by test_matrix.py.

Some are run on GPUs too, by tests/gpu/test_eight_ranks.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any

import torch
from models import MICRO_BATCH_SIZE

from ray_etc.planners.parallel import ParallelConfig


@dataclass(frozen=True)
class Row:
    """The state of `model` under `old`, moved to `new`, and back to a third generation like the first.

    `optimizer` are arguments of Megatron's OptimizerConfig and a few that `models.Trainee` knows, `change` those of the
    model. `oracle` says what the state that arrived is compared with: "checkpoint" is Megatron's own distributed
    checkpoint, saved under `old` and loaded under `new`; "catalogue" the whole tensors put together out of all ranks'
    shards, where Megatron's checkpoint does not support the transition, for the reason in `why`. `elsewhere`: to slots
    that share none with the old ones. A `quick` row runs in every build, and one marked `gpus` also on those, see
    `widened`.
    """

    model: str
    old: ParallelConfig
    new: ParallelConfig
    optimizer: dict[str, Any] = field(default_factory=dict)
    change: dict[str, Any] = field(default_factory=dict)
    oracle: str = "checkpoint"
    why: str = ""
    elsewhere: bool = False
    quick: bool = False
    gpus: bool = False

    def __str__(self) -> str:
        how = [self.options] if self.options else []
        by = ["by catalogue"] if self.oracle == "catalogue" else []
        return ", ".join([self.model, f"{self.old} to {self.new}", *how, *by])

    @property
    def options(self) -> str:
        words = {**self.optimizer, **self.change}
        told = [f"{name}={str(words[name]).removeprefix('torch.')}" for name in sorted(words)]
        return ", ".join([*told, *["elsewhere"] * self.elsewhere])

    @property
    def batch_size(self) -> int:
        """The smallest that both configurations can share, of at least two micro-batches a pipeline."""
        micro_batches = lcm(self.old.data_parallel, self.new.data_parallel)
        # Interleaved schedules need a multiple of the stages.
        stages = lcm(*(p.pipeline_parallel if p.virtual_pipeline > 1 else 1 for p in (self.old, self.new)))
        return max(2, micro_batches) * stages * MICRO_BATCH_SIZE


def mesh(
    tp: int = 1, pp: int = 1, dp: int = 1, cp: int = 1, ep: int = 1, etp: int | None = None, vpp: int = 1, **more: Any
) -> ParallelConfig:
    return ParallelConfig(
        tp,
        pp,
        dp,
        context_parallel=cp,
        expert_parallel=ep,
        expert_tensor_parallel=etp,
        virtual_pipeline=vpp,
        **{"sequence_parallel": tp > 1, **more},
    )


ONE = mesh()
PLAIN = {"distributed_optimizer": False}
NO_SP = {"sequence_parallel": False}
BF16: dict[str, Any] = {"dtype": torch.bfloat16}
FP16: dict[str, Any] = {"dtype": torch.float16, "initial_loss_scale": 2.0**16, "loss_scale_window": 2, "hysteresis": 1}
SGD: dict[str, Any] = {"optimizer": "sgd"}
MUON: dict[str, Any] = {"optimizer": "muon"}
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 300}
GATHER = {"overlap_grad_reduce": True, "overlap_param_gather": True}
FIRST_CHUNK_AT_ONCE = {"overlap_param_gather_with_optimizer_step": True}
PRECISE: dict[str, Any] = {"use_precision_aware_optimizer": True, "fused_adam": True, **BF16}
MOMENTS = {**PRECISE, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
WHOLE_MAINS = {"store_param_remainders": False}
FOUR_LAYERS = {"num_layers": 4}
THREE_LAYERS = {"num_layers": 3}
ALL_GATHER = {"moe_token_dispatcher_type": "allgather"}
IN_FP32 = {"in_fp32": ("input_layernorm.weight", "router.weight")}
ROUND = {"vocab_size": 32}
PADDED = "Megatron's checkpoint takes the padding between several gradient buckets for state"
REMAINDERS = "Megatron cannot load the remainders of main weights that it saves"
OTHER_CHAIN = (
    "Megatron's checkpoint numbers chained optimizers, which are others where experts have no mesh of their own"
)
NO_FP32 = "Megatron cannot save an optimizer without ZeRO-1 of weights some of which are in fp32"
NO_SGD = "Megatron cannot load the optimizer state of SGD"
NO_EXPERTS = "Megatron cannot save the optimizer of a stage that has no experts while others have some"
TWO_COPIES = (
    "Megatron's checkpoint loses the end of the optimizer state of an embedding that the first and the last stage "
    "hold, or has another's for it"
)

DENSE = [
    # One, three and two ranks.
    Row("llama", ONE, mesh(dp=3)),
    Row("llama", mesh(dp=3), mesh(dp=2), BF16, quick=True, gpus=True),
    Row("llama", mesh(dp=3), mesh(tp=2), BF16),
    Row("llama", mesh(pp=2), mesh(dp=3, **PLAIN), BF16),
    Row("llama", mesh(tp=2, pp=2), mesh(dp=3), quick=True),
    # Grow, change at the same size, shrink. The 29 words are padded to 30 under TP2 and to 32 under TP4.
    Row("llama", mesh(tp=2), mesh(tp=2, dp=2)),
    Row("llama", mesh(tp=2, dp=2, **NO_SP), mesh(pp=2, dp=2), BF16, gpus=True),
    Row("llama", mesh(tp=4), ONE, BF16, quick=True, gpus=True),
    Row("llama", ONE, mesh(pp=4), BF16, FOUR_LAYERS),
    Row("llama", mesh(dp=2), mesh(tp=4), BF16, gpus=True),
    Row("llama", mesh(tp=2), mesh(dp=2), BF16),
    Row("llama", mesh(pp=2, dp=2), mesh(pp=2)),
    # Fewer groups of keys than tensor-parallel ranks.
    Row("llama", mesh(tp=4), mesh(tp=2)),
    Row("llama", mesh(tp=2, dp=2), mesh(tp=4)),
    Row("llama", mesh(tp=4), mesh(pp=2, dp=2), BF16, gpus=True),
    Row("llama", mesh(tp=4, **NO_SP), mesh(pp=4), change=FOUR_LAYERS),
    # ZeRO-1 off and on.
    Row("llama", mesh(dp=2), mesh(dp=2, **PLAIN)),
    Row("llama", mesh(dp=2, **PLAIN), mesh(dp=2), BF16),
    Row("llama", mesh(tp=2, pp=2, **PLAIN), mesh(tp=2, dp=2), BF16),
    Row("llama", mesh(pp=4, **PLAIN), mesh(tp=4), change=FOUR_LAYERS),
    Row("llama", mesh(tp=2, dp=2, **PLAIN), mesh(pp=4, **PLAIN), BF16, FOUR_LAYERS),
    Row("llama", mesh(dp=4, **PLAIN), mesh(dp=2), BF16),
    # Nothing is in place.
    Row("llama", mesh(tp=2), mesh(tp=2), elsewhere=True),
    Row("llama", mesh(dp=2), mesh(dp=4), BF16, elsewhere=True, quick=True),
    # Five words over four ranks: the third rank has one of them and the last none.
    Row("llama", mesh(tp=4), mesh(tp=2), change={"vocab_size": 5}),
    Row("llama", mesh(tp=4, **PLAIN), mesh(dp=3), BF16, {"vocab_size": 5}, quick=True),
    # Axes that are no power of two.
    Row("llama, six heads", mesh(tp=3), mesh(tp=2, dp=2), quick=True),
    Row("llama, six heads", mesh(tp=3, dp=2), mesh(tp=6), BF16),
    Row("llama", mesh(pp=3), mesh(dp=2), BF16, THREE_LAYERS),
]

MAMBA = "hybrid with a stand-in of Mamba's scan"
DELTA = "hybrid with a stand-in of fla's gated delta nets"

ATTENTION = [
    Row("llama, QK norms and biases", mesh(tp=2), mesh(pp=2), BF16, quick=True),
    Row("llama, QK norms and biases", mesh(tp=4), mesh(tp=2, dp=2)),
    Row("gpt2", mesh(tp=2), mesh(dp=2), quick=True),
    Row("gpt2", mesh(pp=2, **PLAIN), mesh(tp=4, **PLAIN), BF16),
    Row("gpt2", mesh(tp=4), mesh(pp=2, dp=2), change=ROUND),
    Row("llama, gates and sinks", mesh(dp=2), mesh(tp=4), BF16),
    Row("gpt2, no biases", mesh(dp=2), mesh(tp=2), BF16),
    Row("gpt2, SwiGLU with biases", mesh(tp=2), mesh(tp=4), BF16, gpus=True),
    Row("gpt2, SwiGLU with biases", mesh(dp=2), mesh(tp=2, pp=2), oracle="catalogue", why=TWO_COPIES),
    Row("latent attention", mesh(tp=2), mesh(dp=2), BF16, quick=True, gpus=True),
    Row("latent attention", mesh(tp=4), mesh(pp=2, dp=2)),
    Row("latent attention, whole queries", mesh(pp=2), mesh(tp=2), BF16),
    Row("hybrid", mesh(pp=2), mesh(tp=2), BF16, quick=True, gpus=True),
    Row("hybrid", mesh(tp=2, dp=2), mesh(pp=2, dp=2)),
    Row(MAMBA, mesh(dp=2), mesh(tp=2), BF16, quick=True),
    Row(MAMBA, mesh(tp=2, pp=2), mesh(dp=3)),
    Row(DELTA, mesh(dp=2), mesh(tp=2), BF16, quick=True),
    Row(DELTA, mesh(tp=2, pp=2), mesh(dp=3)),
    Row("hybrid with two heads", mesh(pp=2), mesh(tp=2), BF16, quick=True),
    Row("hybrid with two heads", mesh(tp=2, pp=2), mesh(dp=3), oracle="catalogue", why=TWO_COPIES),
    Row("hybrid with three heads", mesh(dp=2), mesh(tp=2), BF16),
    Row("hybrid with latent attention", mesh(tp=2), mesh(pp=2), BF16),
    Row("two heads", mesh(pp=2), mesh(tp=2), BF16, quick=True),
    Row("two heads", mesh(tp=2, pp=2), mesh(dp=3), oracle="catalogue", why=TWO_COPIES),
    Row("three heads", mesh(dp=2), mesh(tp=2), BF16),
    Row("three heads", mesh(pp=2), mesh(tp=2, dp=2), oracle="catalogue", why=TWO_COPIES),
    Row("two heads, tied", mesh(tp=2), mesh(dp=2), BF16, gpus=True),
]

GROUPED = "experts, grouped by a stand-in of Transformer Engine's"

EXPERTS = [
    Row("experts", mesh(dp=2, ep=2), mesh(dp=2), BF16, quick=True),
    Row("experts", mesh(dp=2, ep=2), mesh(dp=4, ep=4), BF16),
    Row("experts", mesh(dp=4, ep=2), mesh(dp=2, ep=2)),
    Row("experts", mesh(tp=2, ep=2, etp=1), ONE, BF16, quick=True),
    Row("experts", mesh(tp=2, ep=2, etp=1), mesh(tp=2)),
    Row("experts", mesh(tp=2), mesh(dp=4, ep=4), BF16, quick=True, gpus=True),
    # gloo cannot gather parts of unlike sizes, as the usual dispatcher of tokens does over expert-tensor ranks.
    Row("experts", mesh(tp=2, dp=2, ep=2), mesh(tp=2, dp=2, ep=2, etp=1), BF16, ALL_GATHER, quick=True),
    Row("experts", mesh(dp=4, ep=2, etp=2), mesh(tp=2, dp=2, ep=4, etp=1), change=ALL_GATHER),
    Row("experts", mesh(pp=2, dp=2, ep=2), mesh(dp=4, ep=4), BF16, gpus=True),
    Row("experts", mesh(pp=4), mesh(dp=4, ep=4), BF16, FOUR_LAYERS),
    Row("experts", mesh(dp=2, ep=2, **PLAIN), mesh(dp=2, ep=2), BF16),
    Row("experts", mesh(dp=2, ep=2, **PLAIN), mesh(tp=2, **PLAIN)),
    Row("experts", mesh(dp=3, ep=3), mesh(dp=2, ep=2), BF16, {"num_moe_experts": 6}, quick=True),
    Row("experts", mesh(dp=4, ep=2), mesh(dp=2, cp=2, ep=2), BF16),
    Row("experts, plain", mesh(dp=2, ep=2), mesh(tp=2, ep=2, etp=1), BF16),
    Row(GROUPED, mesh(dp=2, ep=2), mesh(tp=2, ep=2, etp=1), BF16, quick=True),
    Row(GROUPED, mesh(tp=2, dp=2, ep=2), mesh(pp=2), change=ALL_GATHER),
    Row("experts, biased router", mesh(dp=2, ep=2), mesh(tp=2, pp=2), BF16, quick=True),
    Row("experts, biased router", mesh(pp=2), mesh(dp=4, ep=4)),
    Row("experts, balanced by quantiles", mesh(dp=2, ep=2), mesh(tp=2, ep=2, etp=1), BF16, quick=True),
    Row("experts, balanced by quantiles", mesh(pp=2), mesh(dp=4, ep=4)),
    Row("experts, balanced over the batch", mesh(dp=2, ep=2), mesh(tp=2, ep=2, etp=1), BF16),
    Row("experts, balanced by sequence", mesh(dp=2, ep=2), mesh(tp=2, ep=2, etp=1), BF16),
    Row("experts with biases", mesh(dp=2, ep=2), mesh(tp=2, pp=2, ep=2, etp=1), BF16),
    Row("experts, shared by a gate", mesh(dp=2, ep=2), mesh(tp=2, ep=2, etp=1), BF16),
    Row("experts, shared too", mesh(tp=2, ep=2, etp=1), mesh(dp=2, ep=2), BF16, quick=True),
    Row("experts, shared too", mesh(pp=2, dp=2, ep=2), mesh(tp=4, ep=4, etp=1)),
    Row("experts in some layers", mesh(pp=2, dp=2, ep=2), mesh(tp=2, ep=2, etp=1), BF16, FOUR_LAYERS),
    Row("experts in some layers", mesh(dp=2, ep=2), mesh(pp=4), change=FOUR_LAYERS),
    Row("hybrid with experts", mesh(dp=2, ep=2), mesh(tp=2, ep=2, etp=1), BF16),
    Row("deepseek", mesh(dp=2, ep=2), mesh(pp=2, dp=2, ep=2), BF16, oracle="catalogue", why=NO_EXPERTS, quick=True),
    Row("deepseek", mesh(dp=2, ep=2), mesh(tp=2, ep=2, etp=1), BF16),
    Row("deepseek", mesh(tp=2, ep=2, etp=1), mesh(pp=2), BF16),
    Row("deepseek", mesh(tp=2, pp=2, ep=2, etp=1), mesh(dp=4, ep=4), oracle="catalogue", why=NO_EXPERTS),
]

PIPELINE = [
    Row("llama", mesh(pp=2, vpp=2), mesh(pp=4), BF16, FOUR_LAYERS, quick=True, gpus=True),
    Row("llama", mesh(pp=2, vpp=2), mesh(dp=2), change=FOUR_LAYERS),
    Row("llama", ONE, mesh(pp=2, vpp=2), BF16, FOUR_LAYERS, quick=True),
    Row("llama", mesh(tp=2, pp=2, vpp=2), mesh(pp=2, dp=2, **PLAIN), BF16, FOUR_LAYERS),
    Row("gpt2", mesh(pp=2, vpp=2), mesh(pp=2), BF16, FOUR_LAYERS, oracle="catalogue", why=TWO_COPIES),
    Row("gpt2", mesh(pp=2, vpp=2), mesh(dp=2), BF16, {**FOUR_LAYERS, **ROUND}),
    Row("experts", mesh(pp=2, dp=2, ep=2, vpp=2), mesh(dp=4, ep=4), BF16, FOUR_LAYERS, quick=True),
    Row("llama", mesh(pp=2, pipeline_layers=(1, 2)), mesh(tp=2), BF16, THREE_LAYERS),
    Row(
        "llama", mesh(pp=2, pipeline_layers=(1, 2)), mesh(pp=2, pipeline_layers=(2, 1)), BF16, THREE_LAYERS, quick=True
    ),
    Row("llama", mesh(pp=3, pipeline_layers=(1, 2, 1)), mesh(pp=2, dp=2), BF16, FOUR_LAYERS),
    Row("llama", mesh(pp=3, pipeline_layers=(1, 2, 1)), mesh(tp=2), BF16, {**FOUR_LAYERS, "uneven_by_ends": True}),
    Row("llama", mesh(pp=2, vpp=2, pipeline_layers=(1, 2, 1, 1)), mesh(pp=3), change={"num_layers": 5}),
    # The embedding or the loss has a stage of its own.
    Row("llama", mesh(pp=3, pipeline_layers=(0, 1, 1)), mesh(dp=2), BF16, quick=True),
    Row("llama", mesh(pp=2, vpp=2, pipeline_layers=(0, 1, 1, 0)), mesh(pp=3, pipeline_layers=(1, 1, 0)), BF16),
    Row("two heads", mesh(pp=2, vpp=2), mesh(tp=2), BF16, FOUR_LAYERS),
    # These models name their stages in a pattern of their own.
    Row("hybrid", mesh(pp=2, vpp=2), mesh(tp=2), BF16, quick=True),
    Row("hybrid", mesh(pp=2, pipeline_layers=(1, 3)), mesh(tp=2), BF16),
    Row("hybrid with two heads", mesh(pp=2, vpp=2), mesh(tp=2), BF16, oracle="catalogue", why=TWO_COPIES),
    Row("hybrid with experts", mesh(pp=2, pipeline_layers=(3, 1)), mesh(dp=2, ep=2), BF16),
    Row("experts in some layers", mesh(pp=2, pipeline_layers=(3, 1)), mesh(dp=2, ep=2), BF16, FOUR_LAYERS),
]

CONTEXT = [
    Row("llama", mesh(cp=2), mesh(dp=2), BF16, quick=True),
    Row("llama", mesh(cp=2), mesh(tp=2)),
    Row("llama", mesh(tp=2, cp=2), mesh(pp=2, dp=2), BF16, quick=True, gpus=True),
    Row("llama", mesh(pp=2, cp=2, vpp=2), mesh(tp=2, dp=2), BF16, FOUR_LAYERS),
    Row("gpt2", mesh(dp=2, cp=2, **PLAIN), mesh(cp=4), BF16),
    Row("hybrid", mesh(cp=2), mesh(tp=2), BF16),
    Row(DELTA, mesh(cp=2), mesh(dp=2), BF16),
    Row("two heads", mesh(cp=2), mesh(tp=2), BF16),
    Row("latent attention", mesh(cp=2), mesh(tp=2), BF16),
    Row("experts", mesh(cp=2, ep=2), mesh(dp=2, ep=2), BF16),
    Row("experts", mesh(tp=2, cp=2, ep=4, etp=1), mesh(pp=2), BF16),
]

OPTIMIZERS = [
    Row("llama", mesh(dp=2), mesh(tp=2), FP16, quick=True),
    Row("experts", mesh(dp=2, ep=2), mesh(dp=2), FP16),
    Row("experts", mesh(tp=2), mesh(dp=2, ep=2, **PLAIN), FP16),
    Row("llama", mesh(dp=2, **PLAIN), mesh(tp=2, **PLAIN), SGD, oracle="catalogue", why=NO_SGD, quick=True),
    Row("experts", mesh(dp=2, ep=2, **PLAIN), mesh(pp=2, **PLAIN), {**SGD, **BF16}, oracle="catalogue", why=NO_SGD),
    Row(
        "llama",
        mesh(dp=2, **PLAIN),
        mesh(pp=2, **PLAIN),
        {**SGD, "sgd_momentum": 0.0},
        oracle="catalogue",
        why=NO_SGD,
    ),
    # Some weights are kept in fp32, beside others of the same size in 16 bits.
    Row("experts", mesh(dp=2), mesh(dp=3), BF16, IN_FP32, quick=True),
    Row("llama", mesh(tp=2, dp=2), mesh(pp=2), FP16, IN_FP32),
    Row("experts", mesh(dp=2, ep=2, **PLAIN), mesh(tp=2), BF16, IN_FP32, oracle="catalogue", why=NO_FP32),
    # Matrices by Muon, and the rest by Adam or Lion.
    Row("llama", mesh(dp=2, **PLAIN), mesh(tp=2, **PLAIN), {**MUON, **BF16}, quick=True),
    Row("llama", mesh(tp=2, pp=2, **PLAIN), mesh(dp=3, **PLAIN), MUON),
    Row(
        "experts",
        mesh(dp=2, ep=2, **PLAIN),
        mesh(tp=2, **PLAIN),
        {**MUON, "muon_scalar_optimizer": "lion", **BF16},
        oracle="catalogue",
        why=OTHER_CHAIN,
    ),
    Row("experts", mesh(tp=2, ep=2, etp=1, **PLAIN), mesh(dp=4, ep=4, **PLAIN), MUON),
    Row("llama", mesh(pp=2, **PLAIN), mesh(tp=4, **PLAIN), {"optimizer": "lion", **BF16}),
    Row("llama", mesh(dp=4), mesh(dp=2), {"instances": 2, **BF16}, quick=True, gpus=True),
    Row("llama", mesh(dp=4), mesh(tp=2, dp=2), {"instances": 2}),
    Row("experts", mesh(dp=4, ep=2), mesh(dp=4), {"instances": 2, **BF16}),
    Row("llama", mesh(dp=2), mesh(tp=2, dp=2), {**BUCKETS, **BF16}, oracle="catalogue", why=PADDED, quick=True),
    Row("llama", mesh(pp=2, vpp=2), mesh(pp=2, dp=2), {"overlap_grad_reduce": True, **BF16}, FOUR_LAYERS),
    Row("experts", mesh(dp=4, ep=2), mesh(dp=2, ep=2), {**BUCKETS, **BF16}, oracle="catalogue", why=PADDED),
    # With a stand-in of Transformer Engine's Adam, which counts steps elsewhere and may hold what torch's does not: by
    # default the precision-aware one keeps of main weights what bf16 lacks.
    Row("llama", mesh(dp=2), mesh(tp=2), {"fused_adam": True, **BF16}),
    Row("experts", mesh(dp=2, ep=2, **PLAIN), mesh(tp=2), {"fused_adam": True, **BF16}),
    Row("llama", mesh(dp=2), mesh(tp=2), {**MOMENTS, **WHOLE_MAINS}),
    Row("experts", mesh(dp=4, ep=2), mesh(tp=2), {**MOMENTS, **WHOLE_MAINS}),
    Row("llama", mesh(tp=2, dp=2), mesh(dp=3), MOMENTS, oracle="catalogue", why=REMAINDERS, quick=True),
    Row("experts", mesh(dp=2, ep=2), mesh(pp=2), {**MOMENTS, **GATHER}, oracle="catalogue", why=REMAINDERS),
    # Each rank has its own range of the weights only, until the next step.
    Row("llama", mesh(dp=2), mesh(dp=3), {**GATHER, **BF16}, quick=True),
    Row("llama", mesh(dp=3), mesh(tp=2, dp=2), {**GATHER, "bucket_size": 300}, oracle="catalogue", why=PADDED),
    Row("llama", mesh(pp=2, dp=2, vpp=2), mesh(dp=2), {**GATHER, **BF16}, FOUR_LAYERS),
    Row("llama", mesh(pp=2, dp=2, vpp=2), mesh(pp=2, vpp=2), {**GATHER, **FIRST_CHUNK_AT_ONCE, **BF16}, FOUR_LAYERS),
    Row("llama", mesh(dp=4), mesh(tp=2, dp=2), {**GATHER, "instances": 2, **BF16}),
    Row("experts", mesh(dp=4, ep=2), mesh(tp=2, dp=2, ep=2, etp=1), {**GATHER, **BF16}, ALL_GATHER),
]

GROUPS = {
    "Dense models": DENSE,
    "Attention, MLPs, embeddings and heads": ATTENTION,
    "Mixtures of experts": EXPERTS,
    "Pipelines": PIPELINE,
    "Context parallelism": CONTEXT,
    "Optimizers": OPTIMIZERS,
}

ROWS = [row for rows in GROUPS.values() for row in rows]


def widened(row: Row, ranks: int) -> Row:
    """`row` with more replicas on both sides, so that the larger has `ranks`, or as near below as its axes allow."""
    factor = ranks // max(row.old.world_size, row.new.world_size)
    old, new = (replace(side, data_parallel=side.data_parallel * factor) for side in (row.old, row.new))
    return replace(row, old=old, new=new)
