"""Pieces: the distinct boxes that are held, made disjoint, with all who hold each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ray_etc.planners.intersect import BoxArray, distinct, join, ranges
from ray_etc.planners.table import LayoutTable


def find_pieces(source: LayoutTable, groups: Sequence[Sequence[int]]) -> tuple[BoxArray, np.ndarray, np.ndarray]:
    """The pieces that each of `groups` (lists of families of `source`) holds.

    Returns the pieces, grouped by the number of the group, and the rows that hold them as pairs of piece and row
    (int64 each, in the order of pieces, then ranks), one row for each rank.
    """
    group, row = _rows_of_groups(source, groups)
    first, box_of_row = distinct(group, source.offsets[row], source.lengths[row])
    boxes = BoxArray(group[first], source.offsets[row[first]], source.lengths[row[first]])
    pieces, part_of = _made_disjoint(boxes)
    # Rows of each box, then of each piece of the box.
    order = np.argsort(box_of_row, kind="stable")
    edges = np.searchsorted(box_of_row[order], np.arange(len(boxes) + 1))
    piece, box = part_of
    owner, place = ranges(edges[box], np.diff(edges)[box])
    holder_piece, holder_row = piece[owner], row[order[place]]
    once, _ = distinct(holder_piece, source.rank[holder_row])
    holder_piece, holder_row = holder_piece[once], holder_row[once]
    order = np.lexsort((source.rank[holder_row], holder_piece))
    return pieces, holder_piece[order], holder_row[order]


def _rows_of_groups(source: LayoutTable, groups: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The rows of all families of each group: (group, row), int64 each."""
    order = np.argsort(source.family, kind="stable")
    edges = np.searchsorted(source.family[order], np.arange(len(source.families) + 1))
    families = np.array([family for group in groups for family in group], dtype=np.int64)
    numbers = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    owner, place = ranges(edges[families], np.diff(edges)[families])
    return numbers[owner], order[place]


def _made_disjoint(boxes: BoxArray) -> tuple[BoxArray, tuple[np.ndarray, np.ndarray]]:
    """Boxes cut against each other wherever they overlap, and the pairs (piece, box) where a piece lies in a box.

    Split tensors are disjoint as they are. Overlaps come from tied weights that two stages cut differently, and from
    unsplit ones that every tensor index cuts with others into a flat range.
    """
    a, b, _ = join(boxes, boxes)
    touches = np.zeros(len(boxes), dtype=bool)
    touches[a[a != b]] = True
    alone, knot = np.flatnonzero(~touches), np.flatnonzero(touches)
    cut = boxes[knot]
    count = -1
    while len(cut) != count:
        count = len(cut)
        for dim in range(cut.offsets.shape[1]):
            cut = _cut_at_edges(cut, dim)
        cut = cut[np.sort(distinct(cut.group, cut.offsets, cut.lengths)[0])]
    piece, box, _ = join(cut, boxes[knot])
    pieces = BoxArray(
        np.concatenate([boxes.group[alone], cut.group]),
        np.concatenate([boxes.offsets[alone], cut.offsets]),
        np.concatenate([boxes.lengths[alone], cut.lengths]),
    )
    return pieces, (
        np.concatenate([np.arange(len(alone)), len(alone) + piece]),
        np.concatenate([alone, knot[box]]),
    )


def _cut_at_edges(boxes: BoxArray, dim: int) -> BoxArray:
    """Each box cut along `dim` wherever a box that it shares elements with begins or ends."""
    a, b, _ = join(boxes, boxes)
    start, stop = boxes.offsets[:, dim], boxes.offsets[:, dim] + boxes.lengths[:, dim]
    owner, at = np.concatenate([a, a]), np.concatenate([start[b], stop[b]])
    inside = (at > start[owner]) & (at < stop[owner])
    first, _ = distinct(owner[inside], at[inside])
    owner = np.concatenate([np.arange(len(boxes)), owner[inside][first]])
    at = np.concatenate([start, at[inside][first]])
    order = np.lexsort((at, owner))
    owner, at = owner[order], at[order]
    is_last = np.append(owner[1:] != owner[:-1], True) if len(owner) else np.zeros(0, dtype=bool)
    until = np.where(is_last, stop[owner], np.append(at[1:], 0)) if len(owner) else at
    offsets, lengths = boxes.offsets[owner].copy(), boxes.lengths[owner].copy()
    offsets[:, dim], lengths[:, dim] = at, until - at
    return BoxArray(boxes.group[owner], offsets, lengths)
