"""The shape of a GPT-like model, and which configurations can hold it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from ray_etc.planners.layout import TensorSpec
from ray_etc.planners.model_tensors import weights
from ray_etc.planners.parallel import ParallelConfig

OPTIMIZER_KINDS = ("main_param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts of a model's mixture layers, by their sizes in elements.

    `ffn` is the width of one expert, `shared_ffn` that of the shared experts together (0: none), which `shared_gate`
    weighs. `dense_layers` are the numbers of the layers that have an ordinary MLP instead. `router_bias` levels the
    load of the experts without a loss: fp32, and not trained by the optimizer.
    """

    count: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: tuple[int, ...] = ()
    router_bias: bool = False
    shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Multi-head latent attention by its sizes in elements; `q_rank` is None where queries are not compressed."""

    q_rank: int | None
    kv_rank: int
    qk_head: int = 128
    qk_rotary: int = 64
    v_head: int = 128


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A GPT-like model by its sizes, in elements; `vocab` is without padding.

    `num_query_groups` below `num_attention_heads` is grouped-query attention. `gated` is SwiGLU (gate, up and down
    instead of two matrices). `positions` is the length of a learned table of positions, 0 for rotary ones. `tied`
    says that the output is the embedding. `biases` gives every linear a bias, `qkv_biases` QKV alone, and `norm_biases`
    every norm. `qk_norms` gives queries and keys a norm each. `mtp_layers` are those that predict further tokens
    (DeepSeek-AI, arXiv 2412.19437, section 2.2), which the last stage holds.
    """

    num_layers: int
    hidden: int
    ffn: int
    num_attention_heads: int
    num_query_groups: int
    vocab: int
    kv_channels: int = 128
    positions: int = 0
    gated: bool = True
    tied: bool = False
    biases: bool = False
    norm_biases: bool = False
    qkv_biases: bool = False
    qk_norms: bool = False
    experts: ExpertShape | None = None
    latent: LatentShape | None = None
    mtp_layers: int = 0

    @property
    def num_parameters(self) -> int:
        """Weights, tied ones once. A router's bias is none: no optimizer trains it."""
        return sum(prod(weight.shape) for weight in weights(self, 1) if weight.is_trained)

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    def tensors(self, pipeline_parallel: int = 1) -> list[TensorSpec]:
        """Every tensor of the training state: bf16 weights, then fp32 main weights and both moments, fp32 buffers last.

        Each kind is in the order of Megatron's parameters. What two stages hold is listed twice: a tied output is the
        embedding once more on the last of several stages, and so is the embedding that multi-token prediction reads.
        """
        listed = list(weights(self, pipeline_parallel))
        forms = [("param", "bfloat16", 2), *((kind, "float32", 4) for kind in OPTIMIZER_KINDS)]
        trained = [
            TensorSpec(kind, one.name, one.shape, dtype, itemsize, one.split_dim, one.layer, one.expert_dim)
            for kind, dtype, itemsize in forms
            for one in listed
            if one.is_trained
        ]
        buffers = [one for one in listed if not one.is_trained]
        return trained + [TensorSpec("buffer", one.name, one.shape, "float32", 4, layer=one.layer) for one in buffers]

    def settled(self, parallel: ParallelConfig) -> ParallelConfig:
        """`parallel`, checked, with the layers of each stage where they do not divide evenly.

        Most stages then hold ceil(layers / stages) layers. The first to hold one less is the last stage, for the output
        layer, then the first, for the embedding, then the last but one, and so on. One less is what Megatron's
        account_for_loss_in_pipeline_split does, two are that with account_for_embedding_in_pipeline_split; for more,
        Megatron needs a pipeline_model_parallel_layout. Model chunks count as stages. ValueError as of `check`.
        """
        self.check(parallel)
        stages = parallel.pipeline_parallel * parallel.virtual_pipeline
        if parallel.pipeline_layers is not None or self.num_layers % stages == 0:
            return parallel
        layers = [-(-self.num_layers // stages)] * stages
        for number in range(sum(layers) - self.num_layers):
            layers[number // 2 if number % 2 else -1 - number // 2] -= 1
        return replace(parallel, pipeline_layers=tuple(layers))

    def check(self, parallel: ParallelConfig) -> None:
        """Raise ValueError, with the numbers and what would do, where `parallel` cannot hold this model."""
        split = [("num_attention_heads", self.num_attention_heads)]
        if self.latent is None:
            split.insert(0, ("num_query_groups", self.num_query_groups))
        if not all(self.has_experts(layer) for layer in range(self.num_layers)):
            split.append(("ffn", self.ffn))
        if self.experts is not None:
            split.append(("shared_ffn", self.experts.shared_ffn))
        for name, value in split:
            _must_divide(name, value, "tp", parallel.tensor_parallel)
        self._check_experts(parallel)
        stages, chunks = parallel.pipeline_parallel, parallel.virtual_pipeline
        if stages * chunks > self.num_layers and parallel.pipeline_layers is None:
            each = f" stages of vpp={chunks} chunks" if chunks > 1 else " stages"
            raise ValueError(
                f"num_layers={self.num_layers} cannot fill pp={stages}{each}; use pp<={self.num_layers // chunks}"
            )
        parallel.layers_of_virtual_stages(self.num_layers)

    def _check_experts(self, parallel: ParallelConfig) -> None:
        expert, tensor = parallel.expert_parallel, parallel.tensor_parallel_of_experts
        if self.experts is not None:
            _must_divide("num_experts", self.experts.count, "ep", expert)
            _must_divide("moe_ffn", self.experts.ffn, "etp", tensor)
        elif expert > 1:
            raise ValueError(f"ep={expert}, but the model has no experts; use ep=1")
        elif parallel.has_expert_mesh:
            raise ValueError(f"etp={tensor}, but the model has no experts; leave etp out")


def _must_divide(name: str, value: int, axis: str, size: int) -> None:
    if value % size:
        fitting = [number for number in range(1, value + 1) if value % number == 0]
        below = [number for number in fitting if number < size][-3:]
        above = [number for number in fitting if number > size][:1]
        use = " or ".join(f"{axis}={number}" for number in (*below, *above))
        raise ValueError(f"{name}={value} cannot be split by {axis}={size}; use {use}")
