"""How a model is spread over ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd, lcm
from typing import NamedTuple


class Coordinate(NamedTuple):
    """A rank's place on the mesh, by its index on each axis.

    `data` counts the context and data axes as one, context first: such ranks hold the same weights, and ZeRO-1 and
    ZeRO-3 split the state over all of them. The last two say where it stands among the experts of its stage.
    """

    tensor: int
    data: int
    pipeline: int
    expert_tensor: int = 0
    expert: int = 0


def nearest(held: Collection[Coordinate], wanted: Coordinate) -> Coordinate:
    """Whose state `wanted` goes on with: the same data index where there is one, else the lowest; then likewise tensor.

    The data index first, so that all ranks of a new tensor-parallel group go on with those of one old group.
    """
    return min(held, key=lambda at: (at.data != wanted.data, at.data, at.tensor != wanted.tensor, at.tensor))


def of_stage(held: Iterable[Coordinate], wanted: Coordinate) -> list[Coordinate]:
    """Those of the same pipeline stage."""
    return [at for at in held if at.pipeline == wanted.pipeline]


def of_tensor(held: Iterable[Coordinate], wanted: Coordinate) -> list[Coordinate]:
    """Those of the same stage that hold the same part of its tensors."""
    return [at for at in of_stage(held, wanted) if at.tensor == wanted.tensor]


def of_experts(held: Iterable[Coordinate], wanted: Coordinate) -> list[Coordinate]:
    """Those of the same stage with the same place among its experts."""
    place = (wanted.expert_tensor, wanted.expert)
    return [at for at in of_stage(held, wanted) if (at.expert_tensor, at.expert) == place]


def sources_of_streams(held: Collection[Coordinate], wanted: Coordinate) -> set[Coordinate]:
    """The at most three old ranks whose streams the new rank at `wanted` may go on with.

    One is the nearest of its pipeline stage, whatever its tensor index: what a tensor-parallel group must draw alike
    comes from there. The others are the nearest with its own tensor index, and with its own place among the experts,
    for what each rank draws for itself.
    """
    candidates = [alike(held, wanted) for alike in (of_stage, of_tensor, of_experts)]
    return {nearest(alike, wanted) for alike in candidates if alike}


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The parallel configuration of one generation.

    Ranks are ordered as Megatron orders them: tensor first, then context, data and pipeline. The same ranks of a stage
    hold its experts by another mesh: expert-tensor first, then expert, then the replicas that are left.

    `distributed_optimizer` is ZeRO-1: the optimizer state is split over the data axis. `fully_sharded` is ZeRO-3 as
    torch's FSDP2 does it: weights too, each tensor by its first dim. `expert_tensor_parallel` is `tensor_parallel`
    unless it is given. `virtual_pipeline` is the model chunks of each stage (interleaved pipelines); the chunks of all
    stages, counted in the order of the model, are its virtual stages. `pipeline_layers` is the layers of each stage,
    or of each virtual stage; even where it is not given.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int | None = None
    virtual_pipeline: int = 1
    pipeline_layers: tuple[int, ...] | None = None
    fully_sharded: bool = False

    def __post_init__(self) -> None:
        for axis in (
            "tensor_parallel",
            "pipeline_parallel",
            "data_parallel",
            "context_parallel",
            "expert_parallel",
            "expert_tensor_parallel",
            "virtual_pipeline",
        ):
            size = getattr(self, axis)
            if axis == "expert_tensor_parallel" and size is None:
                continue
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{axis}={size!r} must be a whole number of at least 1")
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ValueError(
                f"virtual_pipeline={self.virtual_pipeline} interleaves stages, but pipeline_parallel=1; use "
                "virtual_pipeline=1 or more stages"
            )
        if self.fully_sharded and not self.distributed_optimizer:
            raise ValueError(
                "fully_sharded=True splits the optimizer state too: distributed_optimizer=False is no choice"
            )
        if self.pipeline_layers is not None:
            self._check_pipeline_layers(self.pipeline_layers)
        self._check_experts()

    def _check_pipeline_layers(self, layers: tuple[int, ...]) -> None:
        stages, chunks = self.pipeline_parallel, self.virtual_pipeline
        if len(layers) not in (stages, stages * chunks):
            or_chunks = f", or {stages * chunks} for virtual_pipeline={chunks} chunks each" if chunks > 1 else ""
            raise ValueError(
                f"pipeline_layers={layers} has {len(layers)} numbers; give {stages}, one for each of the stages of "
                f"pipeline_parallel={stages}{or_chunks}"
            )
        if any(not isinstance(count, int) or count < 0 for count in layers):
            raise ValueError(f"pipeline_layers={layers} must be whole numbers of at least 0")
        if len(layers) == stages and any(count % chunks for count in layers):
            raise ValueError(
                f"pipeline_layers={layers} cannot be split into virtual_pipeline={chunks} chunks a stage; give all "
                f"{stages * chunks} chunks, in the order of the model"
            )

    def _check_experts(self) -> None:
        experts = self.tensor_parallel_of_experts * self.expert_parallel
        if self.stage_size % experts == 0:
            return
        fitting = [
            size
            for size in range(1, self.stage_size + 1)
            if self.stage_size % (size * self.tensor_parallel_of_experts) == 0
        ]
        below = [size for size in fitting if size < self.expert_parallel][-1:]
        above = [size for size in fitting if size > self.expert_parallel][:1]
        use = "".join(f"expert_parallel={size} or " for size in (*below, *above))
        inner = self.tensor_parallel * self.context_parallel
        raise ValueError(
            f"tensor_parallel={self.tensor_parallel} x context_parallel={self.context_parallel} x "
            f"data_parallel={self.data_parallel} = {self.stage_size} ranks of a stage cannot hold "
            f"expert_tensor_parallel={self.tensor_parallel_of_experts} x expert_parallel={self.expert_parallel}; "
            f"use {use}a multiple of {experts // gcd(experts, inner)} as data_parallel"
        )

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pipeline_parallel

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tensor_parallel * self.replicas

    @property
    def replicas(self) -> int:
        """Ranks that hold the same part of a weight that is no expert's: the context and data axes as one."""
        return self.context_parallel * self.data_parallel

    @property
    def tensor_parallel_of_experts(self) -> int:
        return self.tensor_parallel if self.expert_tensor_parallel is None else self.expert_tensor_parallel

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same part of the same experts, "expert data parallel" in Megatron."""
        return self.stage_size // (self.tensor_parallel_of_experts * self.expert_parallel)

    @property
    def has_expert_mesh(self) -> bool:
        """Whether experts are laid on a mesh of their own; without one Megatron treats them as other weights."""
        return self.expert_parallel > 1 or self.tensor_parallel_of_experts != self.tensor_parallel

    @property
    def model_parallel(self) -> int:
        """The fewest ranks that these axes can be laid over, without replicas; world sizes are multiples of it."""
        inner = self.tensor_parallel * self.context_parallel
        return self.pipeline_parallel * lcm(inner, self.tensor_parallel_of_experts * self.expert_parallel)

    def with_world_size(self, world_size: int) -> ParallelConfig:
        """The same axes otherwise, with as many data-parallel replicas as fill `world_size` ranks."""
        if world_size < 1 or world_size % self.model_parallel:
            raise ValueError(
                f"{world_size} ranks cannot hold {self._inner_axes()}; use a multiple of {self.model_parallel}"
            )
        inner = self.tensor_parallel * self.context_parallel * self.pipeline_parallel
        return replace(self, data_parallel=world_size // inner)

    def _inner_axes(self) -> str:
        axes = [("tensor_parallel", self.tensor_parallel), ("pipeline_parallel", self.pipeline_parallel)]
        if self.context_parallel > 1:
            axes.append(("context_parallel", self.context_parallel))
        if self.has_expert_mesh:
            axes.append(("expert_tensor_parallel", self.tensor_parallel_of_experts))
            axes.append(("expert_parallel", self.expert_parallel))
        return " x ".join(f"{axis}={size}" for axis, size in axes)

    def coordinate(self, rank: int) -> Coordinate:
        pipeline, place = divmod(rank, self.stage_size)
        data, tensor = divmod(place, self.tensor_parallel)
        expert = place // self.tensor_parallel_of_experts % self.expert_parallel
        return Coordinate(tensor, data, pipeline, place % self.tensor_parallel_of_experts, expert)

    def layers_of_virtual_stages(self, num_layers: int) -> tuple[int, ...]:
        """How many of `num_layers` layers each virtual stage holds, in the order of the model.

        Virtual stage v is chunk v // pipeline_parallel of stage v % pipeline_parallel. Raises ValueError where
        `pipeline_layers` are not as many.
        """
        count = self.pipeline_parallel * self.virtual_pipeline
        if self.pipeline_layers is None:
            firsts = [-(-stage * num_layers // count) for stage in range(count + 1)]
            return tuple(stop - start for start, stop in pairwise(firsts))
        if sum(self.pipeline_layers) != num_layers:
            raise ValueError(
                f"pipeline_layers={self.pipeline_layers} are {sum(self.pipeline_layers)} layers; the model has "
                f"{num_layers}"
            )
        if len(self.pipeline_layers) == count:
            return self.pipeline_layers
        return tuple(layers // self.virtual_pipeline for layers in self.pipeline_layers) * self.virtual_pipeline

    def tensor_groups(self, node_size: int | None = None) -> list[list[int]]:
        """Ranks that talk most and should share a node: runs of consecutive ranks, all of one length.

        Those of each tensor-parallel group, of experts and of the rest; with `node_size` (ranks a node) also those
        of the context and expert axes, where whole ones fill a node, so that they fit wherever the tensor groups do.
        """
        tensor, of_experts = self.tensor_parallel, self.tensor_parallel_of_experts
        size = lcm(tensor, of_experts)
        for context in (1, self.context_parallel):
            for expert in (1, self.expert_parallel):
                wider = lcm(tensor * context, of_experts * expert)
                if node_size is not None and wider > size and node_size % wider == 0:
                    size = wider
        return [list(range(first, first + size)) for first in range(0, self.world_size, size)]

    def __str__(self) -> str:
        axes = f"TP{self.tensor_parallel} PP{self.pipeline_parallel} DP{self.data_parallel}"
        if self.context_parallel > 1:
            axes += f" CP{self.context_parallel}"
        if self.has_expert_mesh:
            axes += f" EP{self.expert_parallel}"
        if self.tensor_parallel_of_experts != self.tensor_parallel:
            axes += f" ETP{self.tensor_parallel_of_experts}"
        if self.virtual_pipeline > 1:
            axes += f" VPP{self.virtual_pipeline}"
        if self.pipeline_layers is not None and len(set(self.pipeline_layers)) > 1:
            axes += f" layers {'-'.join(map(str, self.pipeline_layers))}"
        if self.sequence_parallel:
            axes += " SP"
        if self.fully_sharded:
            return axes + " FSDP"
        return axes + (" ZeRO-1" if self.distributed_optimizer else "")
