"""Public models as data: the shapes of their weights and optimizer state, by Megatron's names.

Dense models only: an expert axis is not planned yet, so mixtures of experts are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ray_etc.planners.layout import TensorSpec
from ray_etc.planners.parallel import ParallelConfig

OPTIMIZER_KINDS = ("main_param", "exp_avg", "exp_avg_sq")

Part = tuple[str, tuple[int, ...], int | None, int]
"""(name, shape in elements, split_dim, layer) of one weight; see TensorSpec."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A GPT-like model by its sizes, in elements; `vocab` is without padding.

    `num_query_groups` below `num_attention_heads` is grouped-query attention. `gated` is SwiGLU (gate, up and down
    instead of two matrices). `positions` is the length of a learned table of positions, 0 for rotary ones. `tied`
    says that the output is the embedding. `biases` gives every linear and norm a bias.
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

    @property
    def num_parameters(self) -> int:
        """Weights, tied ones once."""
        return sum(prod(shape) for _, shape, _, _ in self._parts(1))

    def tensors(self, pipeline_parallel: int = 1) -> list[TensorSpec]:
        """Every tensor of the training state: bf16 weights, then fp32 main weights and both moments.

        Each kind is in the order of Megatron's parameters (norms of a layer first, the way the local layer spec has
        them). The fused first matrix of SwiGLU is two tensors, up listed before gate: an optimizer bucket runs
        through parameters backwards but through each of them forwards, so there gate comes first. QKV is one
        tensor whose rows go group by group (the queries of a group, its key, its value), so that a tensor axis that
        divides the groups cuts it in boxes. A tied output is the embedding once more on the last of several stages.
        """
        forms = [("param", "bfloat16", 2), *((kind, "float32", 4) for kind in OPTIMIZER_KINDS)]
        parts = list(self._parts(pipeline_parallel))
        return [
            TensorSpec(kind, name, shape, dtype, itemsize, split_dim, layer)
            for kind, dtype, itemsize in forms
            for name, shape, split_dim, layer in parts
        ]

    def check(self, parallel: ParallelConfig) -> None:
        """Raise ValueError, with the numbers and what would do, where `parallel` cannot hold this model."""
        tensor, pipeline = parallel.tensor_parallel, parallel.pipeline_parallel
        for name in ("num_query_groups", "num_attention_heads", "ffn"):
            _must_divide(name, getattr(self, name), "tp", tensor)
        _must_divide("num_layers", self.num_layers, "pp", pipeline)

    def _parts(self, pipeline_parallel: int) -> Iterator[Part]:
        last = self.num_layers
        embedding = ("embedding.word_embeddings.weight", (self.vocab, self.hidden), 0)
        yield (*embedding, -1)
        if self.positions:
            yield ("embedding.position_embeddings.weight", (self.positions, self.hidden), None, -1)
        for layer in range(self.num_layers):
            yield from self._layer(layer)
        yield from self._with_bias("decoder.final_layernorm.", (self.hidden,), None, last)
        if not self.tied:
            yield ("output_layer.weight", (self.vocab, self.hidden), 0, last)
        elif pipeline_parallel > 1:
            yield (*embedding, last)

    def _layer(self, layer: int) -> Iterator[Part]:
        attention, mlp = (f"decoder.layers.{layer}.{block}." for block in ("self_attention", "mlp"))
        heads = self.num_attention_heads * self.kv_channels
        qkv = heads + 2 * self.num_query_groups * self.kv_channels
        yield from self._with_bias(attention + "linear_qkv.layer_norm_", (self.hidden,), None, layer)
        yield from self._with_bias(attention + "linear_proj.", (self.hidden, heads), 1, layer)
        yield from self._with_bias(attention + "linear_qkv.", (qkv, self.hidden), 0, layer)
        yield from self._with_bias(mlp + "linear_fc1.layer_norm_", (self.hidden,), None, layer)
        if self.gated:
            for part in ("v", "w"):
                yield (mlp + f"linear_fc1.weight_{part}", (self.ffn, self.hidden), 0, layer)
        else:
            yield from self._with_bias(mlp + "linear_fc1.", (self.ffn, self.hidden), 0, layer)
        yield from self._with_bias(mlp + "linear_fc2.", (self.hidden, self.ffn), 1, layer)

    def _with_bias(self, prefix: str, shape: tuple[int, ...], split_dim: int | None, layer: int) -> Iterator[Part]:
        """The weight, and its bias if the model has them; that of a matrix cut by columns is whole on every rank."""
        yield (prefix + "weight", shape, split_dim, layer)
        if self.biases:
            yield (prefix + "bias", shape[:1], split_dim if split_dim == 0 else None, layer)


def _must_divide(name: str, value: int, axis: str, size: int) -> None:
    if value % size:
        fitting = [number for number in range(1, value + 1) if value % number == 0]
        below = [number for number in fitting if number < size][-3:]
        above = [number for number in fitting if number > size][:1]
        use = " or ".join(f"{axis}={number}" for number in (*below, *above))
        raise ValueError(f"{name}={value} cannot be split by {axis}={size}; use {use}")


def _gpt3(num_layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(
        num_layers, hidden, 4 * hidden, heads, heads, 50257, positions=2048, gated=False, tied=True, biases=True
    )


ZOO: dict[str, ModelShape] = {
    # Brown et al., arXiv 2005.14165, table 2.1. Its 24 heads of 128 for 1.3B do not make its width of 2048: 16 do.
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "gpt3-175b": _gpt3(96, 12288, 96),
    # Touvron et al., arXiv 2307.09288, and the config.json of each checkpoint.
    "llama2-7b": ModelShape(32, 4096, 11008, 32, 32, 32000),
    "llama2-13b": ModelShape(40, 5120, 13824, 40, 40, 32000),
    "llama2-70b": ModelShape(80, 8192, 28672, 64, 8, 32000),
    # Llama team, arXiv 2407.21783, table 3.
    "llama3-8b": ModelShape(32, 4096, 14336, 32, 8, 128256),
    "llama3-70b": ModelShape(80, 8192, 28672, 64, 8, 128256),
    "llama3-405b": ModelShape(126, 16384, 53248, 128, 8, 128256),
}
"""Model shapes by the name that the command line takes."""


def model_named(name: str) -> ModelShape:
    """The model of the zoo called `name`; ValueError lists the names there are."""
    if name not in ZOO:
        raise ValueError(f"model {name!r} is not known; use one of {', '.join(ZOO)}")
    return ZOO[name]
