"""Expected layouts: what each rank of a configuration that no rank has reported yet is likely to hold.

Only used to choose slots before the next generation starts. The plan itself is made from the layouts that its ranks
report, so a wrong guess here costs bytes on the wire, never correctness.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ray_etc.planners.boxes import Box, flat_range_to_boxes
from ray_etc.planners.layout import RankLayout, Shard, TensorSpec
from ray_etc.planners.parallel import ParallelConfig


def expected_layouts(tensors: Iterable[TensorSpec], parallel: ParallelConfig) -> list[RankLayout]:
    """The layout of each rank of `parallel`, in the order of ranks, for a model of `tensors` in Megatron's order.

    Tensors are cut along `split_dim` over the tensor axis in chunks of ceil(length / size), the last ones short or
    empty; spread by `layer` over the pipeline axis, where the highest layer of the model means "after the last
    one"; and replicated over the data axis. With `distributed_optimizer`, all of a rank's parts of one kind other
    than "param" are laid end to end in the reverse order of `tensors`, as in Megatron's gradient buckets, and cut
    into one equal flat range a data rank.
    """
    tensors = list(tensors)
    layers = layer_count(tensors)
    kinds = list(dict.fromkeys(tensor.kind for tensor in tensors))
    layouts: list[RankLayout] = []
    for rank in range(parallel.world_size):
        at = parallel.coordinate(rank)
        parts = [
            Shard(tensor, tensor_parallel_box(tensor, at.tensor, parallel.tensor_parallel))
            for tensor in tensors
            if is_on_stage(tensor, at.pipeline, parallel.pipeline_parallel, layers)
        ]
        layout: list[Shard] = []
        for kind in kinds:
            of_kind = [part for part in parts if part.tensor.kind == kind]
            if parallel.distributed_optimizer and kind != "param":
                layout.extend(_flat_range(of_kind[::-1], at.data, parallel.data_parallel))
            else:
                layout.extend(of_kind)
        layouts.append(tuple(layout))
    return layouts


def layer_count(tensors: Iterable[TensorSpec]) -> int:
    """The highest layer of the model, which stands for what follows the last one."""
    return max((tensor.layer for tensor in tensors if tensor.layer is not None), default=0)


def tensor_parallel_box(tensor: TensorSpec, index: int, size: int) -> Box:
    """The box of `tensor` that index `index` of a tensor axis of `size` holds."""
    whole = Box.whole(tensor.shape)
    dim = tensor.split_dim
    if dim is None:
        return whole
    length = tensor.shape[dim]
    chunk = -(-length // size)
    start, stop = min(index * chunk, length), min((index + 1) * chunk, length)
    offsets, lengths = list(whole.offsets), list(whole.lengths)
    offsets[dim], lengths[dim] = start, stop - start
    return Box(tuple(offsets), tuple(lengths))


def is_on_stage(tensor: TensorSpec, stage: int, stage_count: int, layers: int) -> bool:
    """Whether pipeline stage `stage` of `stage_count` holds `tensor`, of a model of `layers` layers."""
    if tensor.layer is None:
        return True
    if tensor.layer < 0:
        return stage == 0
    if tensor.layer >= layers:
        return stage == stage_count - 1
    return stage == tensor.layer * stage_count // layers


def _flat_range(parts: Sequence[Shard], index: int, count: int) -> list[Shard]:
    """Range `index` of `count` equal ones of `parts` laid end to end, as shards."""
    chunk = -(-sum(part.box.numel for part in parts) // count)
    shards: list[Shard] = []
    first = 0
    for part in parts:
        start, stop = max(index * chunk - first, 0), min((index + 1) * chunk - first, part.box.numel)
        for box, _ in flat_range_to_boxes(start, stop, part.box.lengths):
            shards.append(Shard(part.tensor, box.shifted(part.box.offsets)))
        first += part.box.numel
    return shards
