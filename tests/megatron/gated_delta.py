"""Megatron's gated delta nets without `fla`, whose kernels need a GPU: its own rule in torch, and a stand-in for the
one function of `fla` that this needs.

Not yet run with `fla` itself.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.gated_delta_net import common
from megatron.core.ssm.gated_delta_net.common import GatedDeltaNetSubmodules
from megatron.core.ssm.gated_delta_net.gdn import GatedDeltaNet
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from ray_etc.megatron.spec import local_norm


def of_length_one(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + eps)).to(x.dtype)


class HeadNorm(torch.nn.RMSNorm):
    """Over the channels of a head. Each tensor-parallel rank has heads of its own, so gradients are partial sums."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def gated_delta_layer() -> ModuleSpec:
    """A layer of Megatron's, from its local modules and what stands in here; for `deterministic_mode`."""
    common.HAVE_FLA = True
    common.l2norm = of_length_one
    parts = GatedDeltaNetSubmodules(ColumnParallelLinear, HeadNorm, RowParallelLinear)
    net = ModuleSpec(GatedDeltaNet, submodules=parts)
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=local_norm, self_attention=net, self_attn_bda=get_bias_dropout_add
        ),
    )
