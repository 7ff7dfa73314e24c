"""What a generation holds, as metadata: logical tensors, and the shard of them that each rank keeps."""

from __future__ import annotations

from dataclasses import dataclass

from ray_etc.planners.boxes import Box


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One logical tensor of the training state: no tensor-parallel split, no padding, no fusion.

    `kind` tells weights from their optimizer state ("param", "main_param", "exp_avg", "exp_avg_sq"), so that a
    bf16 working weight and its fp32 main weight are never mistaken for each other; "buffer" is state that is not
    trained, such as a router's expert bias. `split_dim`, `layer` and `expert_dim` say where tensor, pipeline and
    expert parallelism would cut; they only serve to guess a layout that no rank has reported yet, and never decide
    what is moved. `expert_dim` counts the experts of a layer, and marks a weight as the experts' own.

    `derived_from` is the kind of the tensor of the same name whose values, rounded to this dtype, are exactly these: a
    bf16 working weight is that of its fp32 main weight.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    split_dim: int | None = None
    layer: int | None = None
    expert_dim: int | None = None
    derived_from: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        return (self.kind, self.name)


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a logical tensor that a rank holds, in the logical tensor's coordinates."""

    tensor: TensorSpec
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.tensor.itemsize


RankLayout = tuple[Shard, ...]
"""The shards of one rank, in the order of the storage views that hold them."""
