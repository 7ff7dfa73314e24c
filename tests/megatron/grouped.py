"""A stand-in for Transformer Engine's grouped matrices of experts, which is not to be had here.

It has their interface towards Megatron's `TEGroupedMLP`, which is real: constructor, weights "weight0", "weight1", ...
with their marks, forward, and their part of a checkpoint. Not yet run with Transformer Engine itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class GroupedLinear(torch.nn.Module):
    """One matrix an expert; `split_dim` is the dim of each that expert-tensor ranks divide."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        pg_collection: Any,
        split_dim: int,
        **_: Any,
    ) -> None:
        super().__init__()
        self._groups, self._split_dim, self._count = pg_collection, split_dim, num_gemms
        shape = [output_size, input_size]
        shape[split_dim] //= pg_collection.expt_tp.size()
        for number in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype).normal_(std=0.02))
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            self.register_parameter(f"weight{number}", weight)

    def forward(self, tokens: torch.Tensor, tokens_per_expert: list[int]) -> tuple[torch.Tensor, None]:
        parts = torch.split(tokens, tokens_per_expert)
        return torch.cat([F.linear(part, getattr(self, f"weight{n}")) for n, part in enumerate(parts)]), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """Each expert by its number among all."""
        singleton = metadata.get("singleton_local_shards", False)
        sharded = {}
        for number in range(self._count):
            expert = self._groups.ep.rank() * self._count + number
            place = () if singleton else ((len(sharded_offsets), expert, self._groups.ep.size() * self._count),)
            one = make_sharded_tensors_for_checkpoint(
                {f"{number}.weight": getattr(self, f"weight{number}")},
                "",
                {f"{number}.weight": self._split_dim},
                (*sharded_offsets, *place),
                tp_group=self._groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(one, f"{number}.", f"{expert}.{prefix}" if singleton else prefix)
            part = one[f"{number}.weight"]
            part.replica_id = (*part.replica_id[:2], self._groups.expt_dp.rank())
            sharded[f"{prefix}weight{number}"] = part
        return sharded


def group_experts(layer: ModuleSpec) -> None:
    """Give a layer with experts the grouped ones."""
    fc1, fc2 = (partial(GroupedLinear, split_dim=dim) for dim in (0, 1))
    experts = partial(TEGroupedMLP, submodules=GroupedMLPSubmodules(linear_fc1=fc1, linear_fc2=fc2))
    layer.submodules.mlp.keywords["submodules"].experts = experts
