"""Expected layouts: what each rank of a configuration that no rank has reported yet is likely to hold.

Only used to choose slots before the next generation starts, and to say what a resize would move before there is a
cluster. The plan itself is made from the layouts that its ranks report, so a wrong guess here costs bytes on the
wire, never correctness.

Where Megatron can be told to do otherwise, this is what it does when it is not: one gradient bucket a buffer (it cuts
buffers into buckets of 40 million parameters and more with overlap_grad_reduce, and gives a tied embedding a bucket of
its own), and experts as Transformer Engine's grouped matrices. The padding between parameters, below 64 elements
each, is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import RankLayout, Shard, TensorSpec
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.ranges import cut_buffers
from ray_etc.planners.table import LayoutTable

UNTRAINED = "buffer"
"""The kind of what no optimizer updates: every replica holds it whole."""


def expected_table(tensors: Iterable[TensorSpec], parallel: ParallelConfig) -> LayoutTable:
    """The layout of every rank of `parallel`, for a model of `tensors` in Megatron's order. Rows go family by family.

    Tensors are cut along `split_dim` over the tensor axis in chunks of ceil(length / size), the last ones short or
    empty; those with an `expert_dim` likewise over the expert axis, and over the expert-tensor axis instead of the
    tensor axis. They are spread by `layer` over the pipeline, where -1 is its beginning, the highest layer of the model
    means "after the last one", and None is every stage. What is left is replicated, and then:

    - ZeRO-1 (`distributed_optimizer`) lays all of a rank's parts of one kind other than "param" and "buffer" end to
      end in the reverse order of `tensors`, as in Megatron's gradient buffers, and cuts that into one equal flat range
      a replica. Each model chunk has a buffer of its own, and one more for experts that have a mesh of their own. There
      each expert of a rank is laid by itself, the last one first, and tensors "..._v" and "..._w" that follow each
      other are two halves of one matrix.
    - `fully_sharded` cuts each tensor but buffers along its first dim into chunks of ceil(length / replicas).

    Raises ValueError where `pipeline_layers` are not the layers of the model.
    """
    table = _with_empty_boxes(list(tensors), parallel)
    filled = table.lengths.prod(axis=1) > 0
    rows = (table.family[filled], table.rank[filled], table.offsets[filled], table.lengths[filled])
    return LayoutTable(table.world_size, table.families, *rows)


def expected_layouts(tensors: Iterable[TensorSpec], parallel: ParallelConfig) -> list[RankLayout]:
    """`expected_table` as one list of shards a rank, kind by kind; a rank also lists tensors of which it holds nothing.

    Shards are in the order of `tensors`, or its reverse where they are parts of a flat buffer.
    """
    tensors = list(tensors)
    table = _with_empty_boxes(tensors, parallel)
    kinds = list(dict.fromkeys(tensor.kind for tensor in tensors))
    places: dict[tuple[str, str], tuple[int, int]] = {}
    for position, tensor in enumerate(tensors):
        direction = -1 if _is_flat(tensor, parallel) else 1
        places.setdefault(tensor.key, (kinds.index(tensor.kind), direction * position))
    held: list[list[tuple[tuple[int, int], Box, TensorSpec]]] = [[] for _ in range(table.world_size)]
    rows = (table.family, table.rank, table.offsets, table.lengths)
    for family, rank, offsets, lengths in zip(*(column.tolist() for column in rows), strict=True):
        for tensor in table.families[family]:
            ndim = len(tensor.shape)
            if all(lengths[ndim:]):  # of a scalar that another rank holds there is no empty box
                held[rank].append((places[tensor.key], Box(tuple(offsets[:ndim]), tuple(lengths[:ndim])), tensor))
    return [
        tuple(Shard(tensor, box) for _, box, tensor in sorted(of_rank, key=lambda one: one[:2])) for of_rank in held
    ]


def layer_count(tensors: Iterable[TensorSpec]) -> int:
    """The highest layer of the model, which stands for what follows the last one."""
    return max((tensor.layer for tensor in tensors if tensor.layer is not None and tensor.layer >= 0), default=0)


@dataclass(frozen=True)
class _Mesh:
    """The ranks of a stage as a weight sees them: rank number % parts is its part, rank number // parts its replica."""

    tensor: int
    expert: int
    replicas: int

    @property
    def parts(self) -> int:
        return self.tensor * self.expert

    def cut(self, tensor: TensorSpec, ndim: int) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and lengths of each part of `tensor`: int64 [parts, ndim], with dims of length 1 added behind."""
        offsets = np.zeros((self.parts, ndim), dtype=np.int64)
        lengths = np.ones((self.parts, ndim), dtype=np.int64)
        lengths[:, : len(tensor.shape)] = tensor.shape
        part = np.arange(self.parts)
        if tensor.split_dim is not None:
            _chunk(offsets, lengths, tensor.split_dim, part % self.tensor, self.tensor)
        if tensor.expert_dim is not None:
            _chunk(offsets, lengths, tensor.expert_dim, part // self.tensor, self.expert)
        return offsets, lengths


def _meshes(parallel: ParallelConfig) -> tuple[_Mesh, _Mesh]:
    """Of experts, and of all other weights."""
    of_experts = _Mesh(parallel.tensor_parallel_of_experts, parallel.expert_parallel, parallel.expert_replicas)
    return of_experts, _Mesh(parallel.tensor_parallel, 1, parallel.replicas)


def _chunk(offsets: np.ndarray, lengths: np.ndarray, dim: int, index: np.ndarray, size: int) -> None:
    """Cut each box along `dim` into chunks of ceil(length / size) and leave chunk `index` of it, all in place."""
    length = lengths[:, dim].copy()
    chunk = -(-length // size)
    start = np.minimum(index * chunk, length)
    offsets[:, dim] += start
    lengths[:, dim] = np.minimum(start + chunk, length) - start


def _is_flat(tensor: TensorSpec, parallel: ParallelConfig) -> bool:
    """Whether ZeRO-1 cuts it into flat ranges."""
    return parallel.distributed_optimizer and not parallel.fully_sharded and tensor.kind not in ("param", UNTRAINED)


class _Rows:
    """Rows of a table in the making, in blocks."""

    def __init__(self) -> None:
        self.families: list[tuple[TensorSpec, ...]] = []
        self._blocks: list[tuple[np.ndarray, ...]] = []

    def add(self, family: np.ndarray | int, rank: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> None:
        self._blocks.append((np.broadcast_to(family, rank.shape), rank, offsets, lengths))

    def table(self, world_size: int, ndim: int) -> LayoutTable:
        empty = (np.zeros(0, np.int64), np.zeros(0, np.int64), *[np.zeros((0, ndim), np.int64)] * 2)
        family, rank, offsets, lengths = (np.concatenate(column) for column in zip(empty, *self._blocks, strict=True))
        return LayoutTable(world_size, tuple(self.families), family, rank, offsets, lengths)


def _with_empty_boxes(tensors: Sequence[TensorSpec], parallel: ParallelConfig) -> LayoutTable:
    """`expected_table`, with a row also where a rank has no elements of a tensor of its stage that is not flat."""
    stages = _virtual_stages(tensors, parallel)
    ndim = max((len(tensor.shape) for tensor in tensors), default=1) or 1
    rows = _Rows()
    _add_boxes([tensor for tensor in tensors if not _is_flat(tensor, parallel)], stages, parallel, ndim, rows)
    flat: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        if _is_flat(tensor, parallel):
            flat.setdefault(tensor.kind, []).append(tensor)
    # Kinds that list the same weights are cut alike: one family a weight.
    alike: dict[tuple[object, ...], list[list[TensorSpec]]] = {}
    for of_kind in flat.values():
        geometry = tuple((t.name, t.shape, t.split_dim, t.layer, t.expert_dim) for t in of_kind)
        alike.setdefault(geometry, []).append(of_kind)
    for kinds in alike.values():
        _add_flat_ranges(kinds, stages, parallel, ndim, rows)
    return rows.table(parallel.world_size, ndim)


Stages = dict[int | None, tuple[int, ...]]
"""The virtual stages that hold the tensors of a layer."""


def _virtual_stages(tensors: Sequence[TensorSpec], parallel: ParallelConfig) -> Stages:
    layers = layer_count(tensors)
    if parallel.pipeline_layers is not None and layers == sum(parallel.pipeline_layers) - 1:
        layers += 1  # nothing follows the last layer
    counts = parallel.layers_of_virtual_stages(layers)
    stage_of_layer = np.repeat(np.arange(len(counts)), counts).tolist()
    stages: Stages = {None: tuple(range(parallel.pipeline_parallel))}
    for layer in {tensor.layer for tensor in tensors} - {None}:
        assert layer is not None
        if layer < 0:
            stages[layer] = (0,)
        else:
            stages[layer] = (stage_of_layer[layer] if layer < layers else len(counts) - 1,)
    return stages


def _add_boxes(tensors: Sequence[TensorSpec], stages: Stages, parallel: ParallelConfig, ndim: int, rows: _Rows) -> None:
    """Add tensors of which a rank holds one box, those of one shape on the same stages as one family."""
    of_experts, of_others = _meshes(parallel)
    named: dict[tuple[str, str], list[TensorSpec]] = {}
    for tensor in tensors:
        named.setdefault(tensor.key, []).append(tensor)
    families: dict[tuple[object, ...], tuple[list[TensorSpec], list[tuple[TensorSpec, int]]]] = {}
    for same in named.values():
        # A tied tensor is listed more than once, and held wherever it is listed.
        places = [(tensor, stage % parallel.pipeline_parallel) for tensor in same for stage in stages[tensor.layer]]
        is_trained = same[0].kind != UNTRAINED
        geometry = tuple((tensor.split_dim, tensor.expert_dim, stage) for tensor, stage in places)
        members, _ = families.setdefault((same[0].shape, is_trained, geometry), ([], places))
        members.append(same[0])
    local = np.arange(parallel.stage_size)
    for members, places in families.values():
        for tensor, stage in places:
            mesh = of_others if tensor.expert_dim is None else of_experts
            offsets, lengths = (parts[local % mesh.parts] for parts in mesh.cut(tensor, ndim))
            if parallel.fully_sharded and tensor.kind != UNTRAINED:
                _chunk(offsets, lengths, 0, local // mesh.parts, mesh.replicas)
            rows.add(len(rows.families), stage * parallel.stage_size + local, offsets, lengths)
        rows.families.append(tuple(members))


def _add_flat_ranges(
    kinds: Sequence[Sequence[TensorSpec]], stages: Stages, parallel: ParallelConfig, ndim: int, rows: _Rows
) -> None:
    """Add what ZeRO-1 cuts into ranges, from kinds that list the same weights; each weight is one family."""
    weights = kinds[0]
    family_of: dict[str, int] = {}
    for position, weight in enumerate(weights):
        if weight.name not in family_of:
            family_of[weight.name] = len(rows.families)
            rows.families.append(tuple(of_kind[position] for of_kind in kinds))
    blocks = []
    for mesh, own in zip(_meshes(parallel), (True, False), strict=True):
        listed = [w for w in weights if (w.expert_dim is not None and parallel.has_expert_mesh) == own]
        parts = _parts_in_buffers(listed, stages, mesh.expert)
        if not parts:
            continue
        weight, stage, expert = np.array(parts).T
        cuts = [mesh.cut(tensor, ndim) for tensor in listed]
        offsets, lengths = (np.stack(column)[weight] for column in zip(*cuts, strict=True))
        single = np.flatnonzero(expert >= 0)
        dims = np.array([-1 if tensor.expert_dim is None else tensor.expert_dim for tensor in listed])[weight[single]]
        # [parts of one expert, parts of the mesh]: which are past the last expert of a short chunk are empty.
        offsets[single, :, dims] += expert[single, None]
        lengths[single, :, dims] = expert[single, None] < lengths[single, :, dims]
        cut = cut_buffers(stage, lengths, mesh.replicas)
        rank = (stage[cut.part] % parallel.pipeline_parallel) * parallel.stage_size + cut.index * mesh.parts + cut.lane
        family = np.array([family_of[tensor.name] for tensor in listed])[weight[cut.part]]
        blocks.append((family, rank, cut.offsets + offsets[cut.part, cut.lane], cut.lengths))
    if blocks:
        family, rank, offsets, lengths = (np.concatenate(column) for column in zip(*blocks, strict=True))
        order = np.lexsort((rank, family))
        rows.add(family[order], rank[order], offsets[order], lengths[order])


def _parts_in_buffers(weights: Sequence[TensorSpec], stages: Stages, expert_size: int) -> list[tuple[int, int, int]]:
    """(position in `weights`, virtual stage, number among a rank's experts or -1), buffer by buffer as laid there."""
    parts: list[tuple[int, int, int]] = []
    for _, group in groupby(enumerate(weights), key=lambda one: _matrix(one[1], one[0])):
        matrix = list(group)
        dim = matrix[0][1].expert_dim
        experts = [-1] if dim is None else range(-(-matrix[0][1].shape[dim] // expert_size))
        parts += [
            (position, stage, expert)
            for expert in experts
            for position, tensor in matrix
            for stage in stages[tensor.layer]
        ]
    parts.reverse()
    return sorted(parts, key=lambda part: part[1])  # stable: the parts of a stage stay in their order


def _matrix(tensor: TensorSpec, position: int) -> object:
    """What tensors of one matrix of an expert have in common: gate and up of SwiGLU lie side by side in it."""
    if tensor.expert_dim is None:
        return position
    return (tensor.layer, re.sub("_[vw]$", "", tensor.name), tensor.shape[tensor.expert_dim])
