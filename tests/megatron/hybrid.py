"""The layers of a HybridModel, from Megatron's local modules and from stand-ins for what needs a GPU."""

from __future__ import annotations

from typing import Any

from gated_delta import gated_delta_layer
from mamba import mamba_layer
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from ray_etc.megatron.spec import local_norm, localize


def hybrid_spec(config: TransformerConfig) -> ModuleSpec:
    """The layers of a HybridModel: attention, MLP and experts each on their own, here from Megatron's local modules.

    Its stack ends in a norm of Transformer Engine's, in whose place is another.
    """
    hybrid_block.TENorm = local_norm
    specs = get_gpt_decoder_layer_specs(config, use_transformer_engine=False, normalization=config.normalization)
    for layer in specs:
        localize(layer)
    dense, experts = (specs[at].submodules for at in (0, -1))
    attention = TransformerLayerSubmodules(
        input_layernorm=local_norm, self_attention=dense.self_attention, self_attn_bda=dense.self_attn_bda
    )

    def mlp(parts: Any) -> TransformerLayerSubmodules:
        return TransformerLayerSubmodules(pre_mlp_layernorm=local_norm, mlp=parts.mlp, mlp_bda=parts.mlp_bda)

    head = MultiTokenPredictionLayerSubmodules(
        enorm=local_norm, hnorm=local_norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None, layer_norm=local_norm
    )
    heads = ModuleSpec(
        MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules([ModuleSpec(MultiTokenPredictionLayer, submodules=head)]),
    )
    return ModuleSpec(
        HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=mamba_layer(),
            gdn_layer=gated_delta_layer(),
            attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
            mla_layer=ModuleSpec(TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(MLPLayer, submodules=mlp(dense)),
            moe_layer=ModuleSpec(MoETransformerLayer, submodules=mlp(experts)),
            mtp_block_spec=heads,
        ),
    )
