"""What a generation holds, as metadata: logical tensors, and the shard of them that each rank keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ray_etc.planners.boxes import Box

Key = tuple[str, str]
"""(kind, name) of a logical tensor."""


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
    def key(self) -> Key:
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


@dataclass(frozen=True)
class Allocations:
    """How the shards of one rank lie in memory: shard i of its layout in allocation `of_shard[i]`, of `nbytes[a]`."""

    of_shard: tuple[int, ...]
    nbytes: tuple[int, ...]

    @classmethod
    def expected(cls, layout: RankLayout, together: Collection[str] = ("param",)) -> Allocations:
        """One a tensor, but one for all of each kind in `together`: as Megatron's distributed optimizer has it."""
        numbers: dict[object, int] = {}
        names: list[object] = [s.tensor.kind if s.tensor.kind in together else s.tensor.key for s in layout]
        of_shard = tuple(numbers.setdefault(name, len(numbers)) for name in names)
        nbytes = [0] * len(numbers)
        for number, shard in zip(of_shard, layout, strict=True):
            nbytes[number] += shard.nbytes
        return cls(of_shard, tuple(nbytes))


def casts_of(
    weights: RankLayout, layout: RankLayout, derived: Mapping[Key, Key]
) -> list[tuple[TensorSpec, Box, int, int]]:
    """What a rank can cast of its `weights`, from the main weights in its `layout`.

    Returns (tensor, box, number of the shard in `weights`, number of the shard in `layout`), each element once.
    """
    mains: dict[Key, list[int]] = {}
    for number, shard in enumerate(layout):
        mains.setdefault(shard.tensor.key, []).append(number)
    found = []
    for number, weight in enumerate(weights):
        # A tied weight may be held twice: one of its main weights will do.
        once = {layout[main].box: main for main in mains.get(derived[weight.tensor.key], ())}
        for main in once.values():
            box = weight.box.intersect(layout[main].box)
            if box is not None:
                found.append((weight.tensor, box, number, main))
    return found
