"""A stand-in for `mamba_ssm`, whose kernels need a GPU, under Megatron's own `MambaMixer`: the scan, step by step.

Not yet run with `mamba_ssm` itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from ray_etc.megatron.spec import local_norm


def scan(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    decay: torch.Tensor,
    D: torch.Tensor,  # noqa: N803  its name there
    headdim: int,
    ngroups: int,
    **_: Any,
) -> torch.Tensor:
    """`projected` is [batch, sequence, gate + (values + two states) + step sizes]; all heads in order."""
    heads, length = len(dt_bias), projected.shape[1]
    inner, width = heads * headdim, conv_weight.shape[-1]
    mixed = projected.shape[-1] - inner - heads
    gate, values, steps = projected.split([inner, mixed, heads], -1)
    padded = F.pad(values.transpose(1, 2), (width - 1, 0))
    values = F.silu(F.conv1d(padded, conv_weight[:, None], conv_bias, groups=mixed)).transpose(1, 2).float()
    x, into, out = values.split([inner, (mixed - inner) // 2, (mixed - inner) // 2], -1)
    x = x.unflatten(-1, (heads, headdim))
    into, out = (part.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2) for part in (into, out))
    steps = F.softplus(steps.float() + dt_bias)
    state, ys = torch.zeros_like(x[:, 0, ..., None] * into[:, 0, :, None]), []
    for at in range(length):
        step = steps[:, at, :, None, None]
        state = torch.exp(step * decay[:, None, None]) * state + step * x[:, at, ..., None] * into[:, at, :, None]
        ys.append((state * out[:, at, :, None]).sum(-1) + D.float()[:, None] * x[:, at])
    return torch.stack(ys, 1).flatten(2).to(projected.dtype) * F.silu(gate)


class GroupNorm(torch.nn.Module):
    """RMSNorm of each group of a rank's channels."""

    def __init__(self, size: int, eps: float, group_size: int, **kwargs: Any) -> None:
        super().__init__()
        del kwargs["norm_before_gate"]
        self.weight = torch.nn.Parameter(torch.ones(size, **kwargs))
        self._group_size, self._eps = group_size, eps
        self.tp_group: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.float().unflatten(-1, (-1, self._group_size))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self._eps)
        return normed.flatten(-2).to(x.dtype) * self.weight

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def mamba_layer() -> ModuleSpec:
    """A layer of Megatron's, from its local modules and what stands in here."""
    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.ExtendedRMSNorm = GroupNorm
    mamba_mixer.mamba_split_conv1d_scan_combined = scan
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
    return ModuleSpec(
        MambaLayer, submodules=MambaLayerSubmodules(norm=local_norm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    )
