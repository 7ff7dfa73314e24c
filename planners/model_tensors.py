"""The weights of a model by Megatron's names, in the order of Megatron's parameters.

Names are those of a checkpoint with Transformer Engine's layers numbered through the model. The fused first matrix of
SwiGLU is two tensors, up (`_v`) listed before gate (`_w`): an optimizer bucket runs through parameters backwards but
through each of them forwards, so there gate comes first. QKV is one tensor whose rows go group by group (the queries of
a group, its key, its value), so that a tensor axis that divides the groups cuts it in boxes. The experts of a layer are
one tensor a matrix, with the number of the expert as dim 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray_etc.planners.model import ExpertShape, LatentShape, ModelShape


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight, with `shape` in elements; the rest as of TensorSpec. Untrained ones are fp32 buffers."""

    name: str
    shape: tuple[int, ...]
    split_dim: int | None
    layer: int
    expert_dim: int | None = None
    is_trained: bool = True


def weights(model: ModelShape, pipeline_parallel: int) -> Iterator[Weight]:
    """Every weight of `model`, those that several of `pipeline_parallel` stages hold once for each."""
    return _Lister(model).all(pipeline_parallel)


class _Lister:
    def __init__(self, model: ModelShape) -> None:
        self.model = model

    def all(self, pipeline_parallel: int) -> Iterator[Weight]:
        model = self.model
        last = model.num_layers
        vocabulary = (model.vocab, model.hidden)
        yield Weight("embedding.word_embeddings.weight", vocabulary, 0, -1)
        if model.mtp_layers and pipeline_parallel > 1:
            yield Weight("embedding.word_embeddings.weight", vocabulary, 0, last)
        if model.positions:
            yield Weight("embedding.position_embeddings.weight", (model.positions, model.hidden), None, -1)
            if model.mtp_layers and pipeline_parallel > 1:
                yield Weight("embedding.position_embeddings.weight", (model.positions, model.hidden), None, last)
        for layer in range(model.num_layers):
            yield from self.transformer_layer(f"decoder.layers.{layer}.", layer, model.has_experts(layer))
        yield from self.norm("decoder.final_layernorm.", model.hidden, last)
        for number in range(model.mtp_layers):
            yield from self.mtp_layer(f"mtp.layers.{number}.", last)
        if not model.tied:
            yield Weight("output_layer.weight", vocabulary, 0, last)
        elif pipeline_parallel > 1 and not model.mtp_layers:
            yield Weight("embedding.word_embeddings.weight", vocabulary, 0, last)

    def mtp_layer(self, prefix: str, layer: int) -> Iterator[Weight]:
        """A layer of multi-token prediction: norms of both inputs, their projection, and a layer like the last one."""
        hidden = self.model.hidden
        yield from self.norm(prefix + "enorm.", hidden, layer)
        yield from self.norm(prefix + "hnorm.", hidden, layer)
        yield Weight(prefix + "eh_proj.weight", (hidden, 2 * hidden), 0, layer)
        has_experts = self.model.has_experts(self.model.num_layers - 1)
        yield from self.transformer_layer(prefix + "transformer_layer.", layer, has_experts)
        yield from self.norm(prefix + "final_layernorm.", hidden, layer)

    def transformer_layer(self, prefix: str, layer: int, has_experts: bool) -> Iterator[Weight]:
        model = self.model
        attention, mlp = prefix + "self_attention.", prefix + "mlp."
        if model.latent is not None:
            yield from self.norm(prefix + "input_layernorm.", model.hidden, layer)
            yield from self.latent_attention(attention, model.latent, layer)
        else:
            yield from self.attention(attention, layer)
        if model.experts is not None and has_experts:
            yield from self.norm(prefix + "pre_mlp_layernorm.", model.hidden, layer)
            yield from self.experts(mlp, model.experts, layer)
        else:
            yield from self.norm(mlp + "linear_fc1.layer_norm_", model.hidden, layer)
            yield from self.mlp(mlp, model.ffn, layer)

    def attention(self, prefix: str, layer: int) -> Iterator[Weight]:
        model = self.model
        heads = model.num_attention_heads * model.kv_channels
        qkv = heads + 2 * model.num_query_groups * model.kv_channels
        yield from self.norm(prefix + "linear_qkv.layer_norm_", model.hidden, layer)
        yield from self.linear(prefix + "linear_proj.", (model.hidden, heads), 1, layer)
        yield from self.linear(prefix + "linear_qkv.", (qkv, model.hidden), 0, layer, model.qkv_biases)
        if model.qk_norms:
            yield from self.norm(prefix + "q_layernorm.", model.kv_channels, layer)
            yield from self.norm(prefix + "k_layernorm.", model.kv_channels, layer)

    def latent_attention(self, prefix: str, latent: LatentShape, layer: int) -> Iterator[Weight]:
        """Down projections are whole on every tensor-parallel rank, as Transformer Engine's layers have them."""
        model = self.model
        hidden, heads = model.hidden, model.num_attention_heads
        queries = heads * (latent.qk_head + latent.qk_rotary)
        yield from self.linear(prefix + "linear_proj.", (hidden, heads * latent.v_head), 1, layer)
        if latent.q_rank is None:
            yield Weight(prefix + "linear_q_proj.weight", (queries, hidden), 0, layer)
        else:
            yield Weight(prefix + "linear_q_down_proj.weight", (latent.q_rank, hidden), None, layer)
            yield from self.up_projection(prefix + "linear_q_up_proj.", (queries, latent.q_rank), layer)
        kv_down = (latent.kv_rank + latent.qk_rotary, hidden)
        yield Weight(prefix + "linear_kv_down_proj.weight", kv_down, None, layer)
        kv_up = (heads * (latent.qk_head + latent.v_head), latent.kv_rank)
        yield from self.up_projection(prefix + "linear_kv_up_proj.", kv_up, layer)

    def up_projection(self, prefix: str, shape: tuple[int, int], layer: int) -> Iterator[Weight]:
        if self.model.qk_norms:
            yield from self.norm(prefix + "layer_norm_", shape[1], layer)
        yield Weight(prefix + "weight", shape, 0, layer)

    def mlp(self, prefix: str, ffn: int, layer: int) -> Iterator[Weight]:
        hidden = self.model.hidden
        if self.model.gated:
            for half in ("v", "w"):
                yield Weight(prefix + f"linear_fc1.weight_{half}", (ffn, hidden), 0, layer)
            if self.model.biases:
                for half in ("v", "w"):
                    yield Weight(prefix + f"linear_fc1.bias_{half}", (ffn,), 0, layer)
        else:
            yield from self.linear(prefix + "linear_fc1.", (ffn, hidden), 0, layer)
        yield from self.linear(prefix + "linear_fc2.", (hidden, ffn), 1, layer)

    def experts(self, prefix: str, experts: ExpertShape, layer: int) -> Iterator[Weight]:
        hidden, count = self.model.hidden, experts.count
        yield Weight(prefix + "router.weight", (count, hidden), None, layer)
        if experts.router_bias:
            yield Weight(prefix + "router.expert_bias", (count,), None, layer, is_trained=False)
        for half in ("_v", "_w") if self.model.gated else ("",):
            name = prefix + "experts.experts.linear_fc1.weight" + half
            yield Weight(name, (count, experts.ffn, hidden), 1, layer, expert_dim=0)
        name = prefix + "experts.experts.linear_fc2.weight"
        yield Weight(name, (count, hidden, experts.ffn), 2, layer, expert_dim=0)
        if experts.shared_ffn:
            if experts.shared_gate:
                yield Weight(prefix + "shared_experts.gate_weight", (1, hidden), None, layer)
            yield from self.mlp(prefix + "shared_experts.", experts.shared_ffn, layer)

    def norm(self, prefix: str, size: int, layer: int) -> Iterator[Weight]:
        yield Weight(prefix + "weight", (size,), None, layer)
        if self.model.norm_biases:
            yield Weight(prefix + "bias", (size,), None, layer)

    def linear(
        self, prefix: str, shape: tuple[int, int], split_dim: int, layer: int, biased: bool = False
    ) -> Iterator[Weight]:
        """The weight, and its bias if the model has them; that of a matrix cut by columns is whole on every rank."""
        yield Weight(prefix + "weight", shape, split_dim, layer)
        if self.model.biases or biased:
            yield Weight(prefix + "bias", shape[:1], split_dim if split_dim == 0 else None, layer)
