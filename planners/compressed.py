"""Layouts of large clusters without a list of shards for each rank.

Ranks that hold the same boxes are one class, and kinds of the same boxes are one family, so that a layout is the
distinct boxes of each tensor instead of one object a rank and shard. The boxes are those of `expected_layouts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.sparse import coo_array, csr_array

from ray_etc.planners.boxes import Box, flat_range_to_boxes
from ray_etc.planners.expected import is_on_stage, layer_count, tensor_parallel_box
from ray_etc.planners.layout import TensorSpec
from ray_etc.planners.parallel import ParallelConfig

Boxes = dict[Box, tuple[int, ...]]
"""The distinct boxes of one tensor that are held, and the classes that hold each."""


@dataclass(frozen=True)
class Family:
    """What one or several kinds of state look like on the ranks of a configuration.

    `kinds` share names, shapes and boxes; `itemsize` is the bytes of an element of all of them together.
    `class_of_rank` is int64 [world_size]: ranks of one class hold exactly the same boxes. `boxes[name]` are those of
    the tensor `name`, without empty ones.
    """

    kinds: tuple[str, ...]
    itemsize: int
    class_of_rank: np.ndarray
    boxes: dict[str, Boxes]

    @property
    def class_count(self) -> int:
        return int(self.class_of_rank.max()) + 1


def compress(tensors: Sequence[TensorSpec], parallel: ParallelConfig) -> list[Family]:
    """What `expected_layouts(tensors, parallel)` says, as one family for the weights and one for the rest.

    All kinds must list the same names and shapes in the same order, as those of the zoo do; ValueError otherwise.
    """
    by_kind: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        by_kind.setdefault(tensor.kind, []).append(tensor)
    geometry = [[(t.name, t.shape, t.split_dim, t.layer) for t in of_kind] for of_kind in by_kind.values()]
    if any(other != geometry[0] for other in geometry):
        raise ValueError(f"kinds {', '.join(by_kind)} do not list the same tensors in the same order")
    families = []
    for kinds in ([k for k in by_kind if k == "param"], [k for k in by_kind if k != "param"]):
        if kinds:
            is_flat = parallel.distributed_optimizer and kinds != ["param"]
            itemsize = sum(by_kind[kind][0].itemsize for kind in kinds)
            families.append(_family(tuple(kinds), itemsize, by_kind[kinds[0]], parallel, is_flat=is_flat))
    return families


def _family(
    kinds: tuple[str, ...], itemsize: int, tensors: Sequence[TensorSpec], parallel: ParallelConfig, *, is_flat: bool
) -> Family:
    """`is_flat`: every rank is a class, and holds one range of its stage's tensors; else data replicas are alike."""
    tensor_size, data_size = parallel.tensor_parallel, parallel.data_parallel
    rank = np.arange(parallel.world_size)
    class_of_rank = rank if is_flat else rank % tensor_size + tensor_size * (rank // (tensor_size * data_size))
    holders: dict[str, dict[Box, set[int]]] = {tensor.name: {} for tensor in tensors}
    layers = layer_count(tensors)
    for stage in range(parallel.pipeline_parallel):
        on_stage = [t for t in tensors if is_on_stage(t, stage, parallel.pipeline_parallel, layers)]
        for index in range(tensor_size):
            parts = [(t.name, tensor_parallel_box(t, index, tensor_size)) for t in on_stage]
            if not is_flat:
                for name, box in parts:
                    holders[name].setdefault(box, set()).add(index + tensor_size * stage)
                continue
            chunk = -(-sum(box.numel for _, box in parts) // data_size)
            first_rank = index + tensor_size * data_size * stage
            first = 0
            for name, box in reversed(parts):
                for data, piece in _pieces(first, chunk, box.lengths):
                    at = first_rank + tensor_size * data
                    holders[name].setdefault(piece.shifted(box.offsets), set()).add(at)
                first += box.numel
    boxes = {
        name: {box: tuple(sorted(classes)) for box, classes in found.items() if box.numel}
        for name, found in holders.items()
    }
    return Family(kinds, itemsize, class_of_rank, boxes)


@lru_cache(maxsize=2**16)
def _pieces(first: int, chunk: int, shape: tuple[int, ...]) -> tuple[tuple[int, Box], ...]:
    """The (data index, box) that a tensor of `shape` which starts at `first` of a flat range falls into.

    The same for each tensor index of an even split, and for each stage that begins alike: hence the cache.
    """
    numel = Box.whole(shape).numel
    if not numel:
        return ()
    return tuple(
        (data, box)
        for data in range(first // chunk, (first + numel - 1) // chunk + 1)
        for box, _ in flat_range_to_boxes(max(data * chunk - first, 0), min((data + 1) * chunk - first, numel), shape)
    )


@dataclass(frozen=True)
class Flows:
    """How the boxes that the classes of `wanted` need are spread over those that hold them.

    int64 arrays, one entry a flow: class `target[i]` finds `nbytes[i]` bytes in each class of `holders[group[i]]`
    alike. The flows of a target class add up to all that it needs.
    """

    target: np.ndarray
    group: np.ndarray
    nbytes: np.ndarray
    holders: tuple[tuple[int, ...], ...]


def flows(wanted: Family, held: Family) -> Flows:
    """Match what is `wanted` with what is `held` in the same kinds.

    Raises ValueError where an element is held nowhere.
    """
    groups: dict[tuple[int, ...], int] = {}
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for name, boxes in wanted.boxes.items():
        if not boxes:
            continue
        sources = _disjoint(held.boxes.get(name, {}))
        common = _common_numel(list(boxes), list(sources))
        needed = np.array([box.numel for box in boxes])
        if not np.array_equal(common.sum(axis=1), needed):
            raise ValueError(f"{name}: {int((needed - common.sum(axis=1)).sum())} elements are held nowhere")
        group_of = np.array([groups.setdefault(classes, len(groups)) for classes in sources.values()])
        row, column = np.nonzero(common)
        classes = list(boxes.values())
        repeats = np.array([len(classes[index]) for index in row])
        target = np.array([one for index in row for one in classes[index]])
        parts.append((target, np.repeat(group_of[column], repeats), np.repeat(common[row, column], repeats)))
    target, group, numel = (np.concatenate(column) for column in zip(*parts, strict=True))
    pairs, where = np.unique(target * len(groups) + group, return_inverse=True)
    nbytes = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(nbytes, where, numel * wanted.itemsize)
    return Flows(pairs // len(groups), pairs % len(groups), nbytes, tuple(groups))


def class_overlap(found: Flows, wanted: Family, held: Family) -> csr_array:
    """Bytes that class i of `wanted` finds in class j of `held`: sparse int64 [classes wanted, classes held]."""
    sizes = np.array([len(classes) for classes in found.holders])
    row = np.repeat(found.target, sizes[found.group])
    column = np.concatenate([np.array(found.holders[group]) for group in found.group])
    nbytes = np.repeat(found.nbytes, sizes[found.group])
    return csr_array(coo_array((nbytes, (row, column)), shape=(wanted.class_count, held.class_count)))


def _disjoint(boxes: Boxes) -> Boxes:
    """The same elements in disjoint boxes, each with every class that holds it.

    Split tensors are disjoint as they are. Unsplit ones are held by every tensor index, cut alike where the split of
    all others is even; only uneven splits make boxes that overlap, which are then cut against each other.
    """
    union = list(boxes)
    total = sum(box.numel for box in union)
    if not union or int(_common_numel(union, union).sum()) == total:
        return boxes
    parts: list[tuple[Box, frozenset[int]]] = []
    for box, classes in boxes.items():
        fresh = [box]
        refined: list[tuple[Box, frozenset[int]]] = []
        for part, known in parts:
            common = part.intersect(box)
            if common is None:
                refined.append((part, known))
                continue
            refined.append((common, known | set(classes)))
            refined.extend((rest, known) for rest in part.minus(common))
            fresh = [rest for piece in fresh for rest in _without(piece, common)]
        parts = refined + [(piece, frozenset(classes)) for piece in fresh]
    return {box: tuple(sorted(classes)) for box, classes in parts}


def _without(box: Box, part: Box) -> list[Box]:
    common = box.intersect(part)
    return [box] if common is None else box.minus(common)


def _common_numel(first: Sequence[Box], second: Sequence[Box]) -> np.ndarray:
    """Elements that each box of `first` shares with each of `second`: int64 [len(first), len(second)]."""
    (a, n), (b, m) = (
        (np.array([box.offsets for box in boxes]), np.array([box.lengths for box in boxes]))
        for boxes in (first, second)
    )
    if not len(first) or not len(second):
        return np.zeros((len(first), len(second)), dtype=np.int64)
    common = np.ones((len(first), len(second)), dtype=np.int64)
    for dim in range(a.shape[1]):
        start = np.maximum(a[:, None, dim], b[None, :, dim])
        stop = np.minimum((a + n)[:, None, dim], (b + m)[None, :, dim])
        common *= np.maximum(stop - start, 0)
    return common
