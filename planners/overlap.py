"""Overlap: how much of what each new rank needs each slot already holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import RankLayout, TensorSpec
from ray_etc.planners.regions import disjoint


def overlap_nbytes(held: Mapping[int, RankLayout], wanted: Sequence[RankLayout], slots: Sequence[int]) -> np.ndarray:
    """Bytes already in place: int64 of shape [len(wanted), len(slots)], one row a new rank, one column a slot.

    `held` is what each slot holds now; a slot that is not in it holds nothing. An element that a slot holds in
    several shards counts once for each shard that wants it. Tensors of another shape or dtype share nothing.
    """
    columns: dict[TensorForm, dict[int, list[Box]]] = defaultdict(lambda: defaultdict(list))
    for column, slot in enumerate(slots):
        for shard in held.get(slot, ()):
            columns[_form(shard.tensor)][column].append(shard.box)
    regions = {
        form: {column: disjoint(boxes) for column, boxes in by_column.items()} for form, by_column in columns.items()
    }
    overlap = np.zeros((len(wanted), len(slots)), dtype=np.int64)
    # Replicas want the same boxes: each distinct one is looked up once.
    known: dict[tuple[TensorForm, Box], np.ndarray] = {}
    for rank, layout in enumerate(wanted):
        for shard in layout:
            form = _form(shard.tensor)
            row = known.get((form, shard.box))
            if row is None:
                row = np.zeros(len(slots), dtype=np.int64)
                for column, region in regions.get(form, {}).items():
                    common = filter(None, (shard.box.intersect(box) for box in region))
                    row[column] = sum(box.numel for box in common) * shard.tensor.itemsize
                known[form, shard.box] = row
            overlap[rank] += row
    return overlap


TensorForm = tuple[str, str, tuple[int, ...], str]


def _form(tensor: TensorSpec) -> TensorForm:
    """What must agree for bytes to be the same bytes: kind, name, shape and dtype."""
    return (tensor.kind, tensor.name, tensor.shape, tensor.dtype)
