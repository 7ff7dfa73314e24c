"""How a model is spread over ranks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple


class Coordinate(NamedTuple):
    """A rank's place on the mesh, by its index on each axis."""

    tensor: int
    data: int
    pipeline: int


def nearest(held: Collection[Coordinate], wanted: Coordinate) -> Coordinate:
    """Whose state `wanted` goes on with: the same data index where there is one, else the lowest; then likewise tensor.

    The data index first, so that all ranks of a new tensor-parallel group go on with those of one old group.
    """
    return min(held, key=lambda at: (at.data != wanted.data, at.data, at.tensor != wanted.tensor, at.tensor))


def sources_of_streams(held: Collection[Coordinate], wanted: Coordinate) -> set[Coordinate]:
    """The at most two old ranks whose streams the new rank at `wanted` may go on with.

    One is the nearest of its pipeline stage, whatever its tensor index: what a tensor-parallel group must draw alike
    comes from there. The other is the nearest with its own tensor index too, for what each rank draws for itself.
    """
    stage = [at for at in held if at.pipeline == wanted.pipeline]
    own = [at for at in stage if at.tensor == wanted.tensor]
    return {nearest(candidates, wanted) for candidates in (stage, own) if candidates}


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The parallel configuration of one generation.

    Ranks are ordered as Megatron orders them: tensor first, then data, then pipeline.
    `distributed_optimizer` is ZeRO-1: the optimizer state is split over the data axis.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True

    def __post_init__(self) -> None:
        for axis in ("tensor_parallel", "pipeline_parallel", "data_parallel"):
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{axis}={size!r} must be a whole number of at least 1")

    @property
    def world_size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def model_parallel(self) -> int:
        """Ranks that together hold the model once."""
        return self.tensor_parallel * self.pipeline_parallel

    def with_world_size(self, world_size: int) -> ParallelConfig:
        """The same tensor and pipeline axes, with as many data-parallel replicas as fill `world_size` ranks."""
        if world_size < 1 or world_size % self.model_parallel:
            raise ValueError(
                f"{world_size} ranks cannot hold tensor_parallel={self.tensor_parallel} x "
                f"pipeline_parallel={self.pipeline_parallel}; use a multiple of {self.model_parallel}"
            )
        return replace(self, data_parallel=world_size // self.model_parallel)

    def coordinate(self, rank: int) -> Coordinate:
        tensor = rank % self.tensor_parallel
        data = rank // self.tensor_parallel % self.data_parallel
        pipeline = rank // (self.tensor_parallel * self.data_parallel)
        return Coordinate(tensor, data, pipeline)

    def tensor_groups(self) -> list[list[int]]:
        """The ranks of each tensor-parallel group: they talk most, and should share a node."""
        size = self.tensor_parallel
        return [list(range(first, first + size)) for first in range(0, self.world_size, size)]

    def __str__(self) -> str:
        axes = f"TP{self.tensor_parallel} PP{self.pipeline_parallel} DP{self.data_parallel}"
        if self.sequence_parallel:
            axes += " SP"
        return axes + (" ZeRO-1" if self.distributed_optimizer else "")
