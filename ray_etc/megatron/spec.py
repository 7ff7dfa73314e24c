"""The transformer layer that needs neither Transformer Engine nor Apex: on CPUs, and on GPUs without them."""

from __future__ import annotations

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class LocalRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, usable under sequence parallelism, which Megatron's own wrapper of it refuses.

    Under sequence parallelism each tensor-parallel rank sees a part of the sequence, so the gradients of this
    weight are partial sums; the mark tells Megatron to add them up.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def local_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage, from Megatron's local modules."""
    layer: ModuleSpec = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = LocalRMSNorm
    layer.submodules.pre_mlp_layernorm = LocalRMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=LocalRMSNorm)
