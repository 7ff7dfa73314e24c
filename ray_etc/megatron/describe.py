"""The catalogue: which boxes of which logical tensors this rank holds, and the memory that holds them.

Names and boxes of weights come from the model's own `sharded_state_dict`, so they are Megatron's checkpoint names;
what the optimizer holds comes from its own range maps. Nothing is copied: each view shares the storage that training
reads and writes.

With `overlap_param_gather` a rank updates its own range of the weights, and gets the rest in the next forward pass. So
between two steps it holds that range, and no more: as the source of a move, since the rest is a step old, and as its
target, since Megatron gathers the rest as it always does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model

from ray_etc.actors.state import StateShard
from ray_etc.megatron import compat, corrections
from ray_etc.planners.boxes import Box, flat_range_to_boxes
from ray_etc.planners.layout import TensorSpec


def describe(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, vocab_size: int | None
) -> list[StateShard]:
    """Every tensor of the training state on this rank.

    Args:
        chunks: the model chunks of this rank, wrapped or not.
        optimizer: the optimizer made by `get_megatron_optimizer` for them; its moments are made if need be.
        vocab_size: rows of the vocabulary without padding; None where it has none.
    """
    _require_plain_weights(chunks)
    compat.require_known_optimizers(optimizer)
    owned: list[compat.Owned] = []
    for leaf in compat.leaf_optimizers(optimizer):
        corrections.correct_positions(leaf)
        compat.create_moments(leaf)
        owned += compat.owned_state(leaf)
    gathered_later = compat.weights_gathered_later(chunks)
    range_of: dict[torch.Tensor, tuple[int, int]] = {param: (start, stop) for param, start, stop, _ in owned}

    shards: list[StateShard] = []
    parts_of: dict[torch.Tensor, list[_Part]] = {}
    for tensor, part in _parts(chunks, vocab_size):
        parts_of.setdefault(tensor, []).append(part)
    _require_all_named(chunks, parts_of)
    for tensor, parts in parts_of.items():
        kind = "param" if isinstance(tensor, torch.nn.Parameter) else "buffer"
        held = tensor.detach().view(-1)
        for part in parts:
            if tensor not in gathered_later:
                shards.extend(part.shards(kind, held, 0, tensor.numel()))
                continue
            start, stop = range_of.get(tensor, (0, 0))
            # Also what it has nothing of is named, so that the parameters keep their order.
            shards.extend(list(part.shards(kind, held[start:stop], start, stop)) or [part.nothing(kind, held)])
    for param, start, stop, tensors in owned:
        for kind, tensor in tensors.items():
            held = tensor.detach().view(-1)
            # An fp32 weight is its own main weight, and is already in the catalogue.
            if held.untyped_storage().data_ptr() != param.untyped_storage().data_ptr():
                for part in parts_of[param]:
                    shards.extend(part.shards(kind, held, start, stop))
    return shards


class _Part:
    """A piece of one local tensor that is a box of one logical tensor; most local tensors are a single part."""

    def __init__(self, sharded: ShardedTensor, whole: torch.Tensor, vocab_size: int | None, config: Any) -> None:
        unit_dims = sharded.prepend_axis_num
        self.name = sharded.key
        self.shape = tuple(sharded.global_shape)
        self.local_shape = tuple(sharded.local_shape)
        self.offsets = tuple(sharded.global_offset)
        self.first = sharded.data.storage_offset() - whole.storage_offset()
        self.numel = sharded.data.numel()
        if vocab_size is not None and sharded.allow_shape_mismatch:
            # Megatron marks so the tensors whose first dim is a padded vocabulary.
            self.shape = (*self.shape[:unit_dims], vocab_size, *self.shape[unit_dims + 1 :])
            rows = min(max(vocab_size - self.offsets[unit_dims], 0), self.local_shape[0])
            self.local_shape = (rows, *self.local_shape[1:])
            # A rank that holds nothing but padding has an empty box at the end of the logical tensor.
            start = min(self.offsets[unit_dims], vocab_size)
            self.offsets = (*self.offsets[:unit_dims], start, *self.offsets[unit_dims + 1 :])
        dim = getattr(whole, "partition_dim", -1) if getattr(whole, "tensor_model_parallel", False) else -1
        self.split_dim = None if dim < 0 else dim + unit_dims
        self.layer = _layer(self.name, config.num_layers)
        self.expert_dim: int | None = None
        if match := re.search(r"\.experts\.experts\.(\d+)\.", self.name):
            self._join_experts(match, config.num_moe_experts)

    def _join_experts(self, match: re.Match[str], experts: int) -> None:
        """The experts of a layer are one logical tensor, so that who has which of them is a matter of boxes."""
        self.name = self.name[: match.start(1)] + self.name[match.end() :]
        self.shape = (experts, *self.shape)
        self.offsets = (int(match[1]), *self.offsets)
        self.expert_dim = 0
        if self.split_dim is not None:
            self.split_dim += 1

    def shards(self, kind: str, held: torch.Tensor, start: int, stop: int) -> Iterator[StateShard]:
        """The boxes of this part among elements [start, stop) of the local tensor, which are all that `held` has."""
        numel = prod(self.local_shape)
        if not numel:
            yield self.nothing(kind, held)
            return
        spec = self._spec(kind, held)
        low, high = max(start - self.first, 0), min(stop - self.first, numel)
        for box, flat in flat_range_to_boxes(low, high, self.local_shape):
            box = self._globally(box)
            first = self.first + flat - start
            yield StateShard(spec, box, held[first : first + box.numel].view(box.lengths))

    def nothing(self, kind: str, held: torch.Tensor) -> StateShard:
        """An empty box where this part begins."""
        box = self._globally(Box.whole((0, *self.local_shape[1:])))
        return StateShard(self._spec(kind, held), box, held[:0].view(box.lengths))

    def _spec(self, kind: str, held: torch.Tensor) -> TensorSpec:
        return TensorSpec(
            kind=kind,
            name=self.name,
            shape=self.shape,
            dtype=str(held.dtype).removeprefix("torch."),
            itemsize=held.element_size(),
            split_dim=self.split_dim,
            layer=self.layer,
            expert_dim=self.expert_dim,
        )

    def _globally(self, box: Box) -> Box:
        unit_dims = len(self.offsets) - len(self.local_shape)
        return Box((0,) * unit_dims + box.offsets, (1,) * unit_dims + box.lengths).shifted(self.offsets)


def _parts(chunks: Sequence[torch.nn.Module], vocab_size: int | None) -> Iterator[tuple[torch.Tensor, _Part]]:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        # Layers by their number in the model, whichever stage holds them.
        "non_homogeneous_layers": True,
        # Gate and up of SwiGLU by names of their own: fused, their order would depend on tensor parallelism.
        "singleton_local_shards": True,
    }
    for chunk in chunks:
        model: Any = unwrap_model(chunk)
        for value in nested_values(model.sharded_state_dict(metadata=metadata)):
            if isinstance(value, ShardedObject):
                _refuse_opaque_state(value)
                continue
            whole = value.data
            if not whole.is_contiguous():
                raise ValueError(f"{value.key} is not contiguous in memory: its layout cannot be described by boxes")
            sharded = list(nested_values(value.build())) if isinstance(value, ShardedTensorFactory) else [value]
            for one in sharded:
                if one.data.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
                    raise ValueError(f"{one.key} is a copy made for checkpoints, not the memory that is trained")
                yield whole, _Part(one, whole, vocab_size, model.config)


def _require_plain_weights(chunks: Sequence[torch.nn.Module]) -> None:
    """Raise ValueError for weights, or what is kept beside them, in 8 or 4 bits.

    Transformer Engine makes its scales in the first step, so that nothing of them is to be seen before.
    """
    for chunk in chunks:
        config: Any = unwrap_model(chunk).config
        for name in ("fp8", "fp4"):
            if getattr(config, name, None):
                raise ValueError(
                    f"{name}={getattr(config, name)!r}: scales and amax histories of Transformer Engine cannot be "
                    "moved; train in bf16 or fp32"
                )


def _require_all_named(chunks: Sequence[torch.nn.Module], parts_of: Mapping[torch.Tensor, Sequence[_Part]]) -> None:
    """Raise ValueError where the model's own `sharded_state_dict` leaves out something that is trained or kept."""
    for chunk in chunks:
        for name, tensor in unwrap_model(chunk).state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor) or name.endswith("_extra_state"):
                continue
            if sum(part.numel for part in parts_of.get(tensor, ())) < tensor.numel():
                raise ValueError(
                    f"sharded_state_dict of the model does not say where all of {name} belongs, so that it would be "
                    "lost in a resize; have the module that holds it name it there"
                )


def _refuse_opaque_state(value: ShardedObject) -> None:
    """Transformer Engine keeps FP8 scales as bytes; empty ones are no loss."""
    data = value.data
    if data is not None and not (isinstance(data, torch.Tensor) and not data.numel()):
        raise ValueError(f"{value.key} is opaque state (FP8 scales?), which cannot be moved; train in bf16 or fp32")


def _layer(name: str, num_layers: int) -> int | None:
    """Where pipeline parallelism puts a tensor, read off its name; a hint only."""
    if name.startswith(("mtp.", "output_layer.")) or ".final_" in name:
        return num_layers
    if match := re.search(r"\blayers\.(\d+)\.", name):
        return int(match[1])
    if "embedding" in name:
        return -1
    return None
