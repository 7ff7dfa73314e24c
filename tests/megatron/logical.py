"""Whole logical tensors out of the shards of all ranks, and back: the slow, obvious way."""

from __future__ import annotations

import torch

from ray_etc.actors.state import TrainState
from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import TensorSpec

RankShards = list[tuple[TensorSpec, Box, torch.Tensor]]
Logical = dict[tuple[str, str], torch.Tensor]


def read(state: TrainState) -> RankShards:
    """A copy of what one rank holds."""
    return [(shard.tensor, shard.box, shard.view.detach().to("cpu", copy=True)) for shard in state.shards]


def whole(ranks: list[RankShards]) -> Logical:
    """The logical tensors. Fails unless each element is held by some rank, and alike by all that hold it."""
    tensors: Logical = {}
    written: Logical = {}
    for spec, box, values in (shard for rank in ranks for shard in rank):
        if spec.key not in tensors:
            tensors[spec.key] = torch.zeros(spec.shape, dtype=values.dtype)
            written[spec.key] = torch.zeros(spec.shape, dtype=torch.bool)
        assert tensors[spec.key].shape == spec.shape, f"ranks disagree on the shape of {spec.key}"
        assert str(values.dtype) == f"torch.{spec.dtype}"
        index = box.slices_in(Box.whole(spec.shape))
        target, done = tensors[spec.key][index], written[spec.key][index]
        assert target.shape == values.shape, f"{spec.key}: {box} leaves its tensor of {spec.shape}"
        assert torch.equal(target[done], values[done]), f"replicas of {spec.key} differ in {box}"
        target.copy_(values)
        done.fill_(True)
    for key, done in written.items():
        assert bool(done.all()), f"{int((~done).sum())} elements of {key} are held by no rank"
    return tensors


def write(state: TrainState, tensors: Logical) -> None:
    """Fill one rank's shards from the logical tensors."""
    for shard in state.shards:
        index = shard.box.slices_in(Box.whole(shard.tensor.shape))
        shard.view.detach().copy_(tensors[shard.tensor.key][index])


def load(state: TrainState, tensors: Logical, small: dict) -> None:
    """Fill one rank from the logical tensors, and its replicated objects from another rank's small state."""
    write(state, tensors)
    state.put_back()
    for name, item in state.replicated.items():
        item.load_state_dict(small["replicated"][name])


def differing(a: Logical, b: Logical) -> list[tuple[str, str]]:
    """The logical tensors that are not bit for bit the same in both."""
    return sorted(key for key in a.keys() | b.keys() if key not in a or key not in b or not torch.equal(a[key], b[key]))
