"""Transformer layers that need neither Transformer Engine nor Apex: on CPUs, and on GPUs without them."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


def local_norm(config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    """torch's LayerNorm or RMSNorm, usable under sequence parallelism, which Megatron's own wrapper of them refuses.

    Under sequence parallelism each tensor-parallel rank sees a part of the sequence, so the gradients of these
    weights are partial sums; the mark tells Megatron to add them up.
    """
    kind = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
    norm: torch.nn.Module = kind(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
    for weight in norm.parameters():
        weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def context_positions(length: int, ranks: int, rank: int) -> torch.Tensor:
    """Which positions of a sequence one of so many context-parallel ranks holds, in Megatron's order."""
    chunks = torch.arange(length).view(2 * ranks, -1)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


class ContextAttention(DotProductAttention):
    """Causal attention of a context-parallel rank's own queries to the keys and values of all: those are gathered.

    Of 2n chunks of a sequence, rank r of n holds chunks r and 2n - 1 - r, as everywhere in Megatron, so that each has
    as much to do. Without context parallelism it is Megatron's own local attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        own = copy(config)
        own.context_parallel_size = 1  # Megatron's refuses any other
        # Latent attention names the sizes of a head as Transformer Engine wants them; here the output is of values.
        own.kv_channels = v_channels or config.kv_channels
        super().__init__(own, *args, **kwargs)
        self._group = kwargs["pg_collection"].cp

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Tensors are [sequence of this rank, batch, heads, head size]."""
        ranks = self._group.size()
        if ranks == 1:
            return super().forward(query, key, value, attention_mask, **kwargs)
        length = query.shape[0] * ranks
        held = [context_positions(length, ranks, rank).to(query.device) for rank in range(ranks)]
        in_order = torch.argsort(torch.cat(held))
        key, value = (
            gather_from_sequence_parallel_region(part.contiguous(), group=self._group)[in_order]
            for part in (key, value)
        )
        later = torch.arange(length, device=query.device) > held[self._group.rank()][:, None]
        return super().forward(query, key, value, later[None, None], **kwargs)


def local_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this rank's pipeline stage, or of one chunk of it, from Megatron's local modules."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        localize(layer)
    block.layer_norm = local_norm
    return block


def local_mtp_spec(
    config: TransformerConfig, block: TransformerBlockSubmodules, vp_stage: int | None = None
) -> MultiTokenPredictionBlockSubmodules | None:
    """The multi-token prediction heads where this rank has them; their layers are like the last one of `block`."""
    if not config.mtp_num_layers:
        return None
    mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False, vp_stage=vp_stage)
    for head in mtp.layer_specs if mtp else ():
        head.submodules.enorm = head.submodules.hnorm = head.submodules.layer_norm = local_norm
    return mtp


def localize(layer: ModuleSpec) -> None:
    """Give one of Megatron's local layers the norms and the attention of this file."""
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = local_norm
    attention = parts.self_attention.submodules
    attention.core_attention = ContextAttention
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(attention, name, IdentityOp) is not IdentityOp:
            setattr(attention, name, local_norm)
