"""Regions: lists of boxes that stand for one part of a tensor together, and how to cut and join them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from ray_etc.planners.boxes import Box


def subtract(region: Iterable[Box], part: Box) -> list[Box]:
    """`region` without the elements of `part`; disjoint where `region` was."""
    rest: list[Box] = []
    for box in region:
        common = box.intersect(part)
        rest.extend([box] if common is None else box.minus(common))
    return rest


def disjoint(boxes: Iterable[Box]) -> list[Box]:
    """The union of `boxes`, each element in exactly one box; earlier boxes stay whole."""
    union: list[Box] = []
    for box in boxes:
        fresh = [box] if box.numel else []
        for known in union:
            fresh = subtract(fresh, known)
        union.extend(fresh)
    return union


def cut(box: Box, max_numel: int) -> list[Box]:
    """Cut `box` into pieces of at most `max_numel` elements, in row-major order.

    Pieces are slabs of whole rows of nearly equal size; only a row that is itself too large is cut
    along the next dim, and so on down to single elements.
    """
    if max_numel < 1:
        raise ValueError(f"max_numel={max_numel}: a piece holds at least one element")
    if box.numel <= max_numel:
        return [box]
    offsets, lengths = box.offsets, box.lengths
    dim = next(dim for dim, length in enumerate(lengths) if length > 1)
    row_numel = prod(lengths[dim + 1 :])
    rows = max(1, max_numel // row_numel)
    slab_count = -(-lengths[dim] // rows)
    pieces: list[Box] = []
    for index in range(slab_count):
        first = lengths[dim] * index // slab_count
        last = lengths[dim] * (index + 1) // slab_count
        slab = Box(
            (*offsets[:dim], offsets[dim] + first, *offsets[dim + 1 :]),
            (*lengths[:dim], last - first, *lengths[dim + 1 :]),
        )
        pieces.extend(cut(slab, max_numel))
    return pieces


def join(boxes: Sequence[Box]) -> list[Box]:
    """Undo cuts: merge neighbours in the list that make one box together. `boxes` are disjoint and row-major."""
    joined: list[Box] = []
    for box in boxes:
        joined.append(box)
        while len(joined) > 1 and (merged := merge(joined[-2], joined[-1])) is not None:
            joined[-2:] = [merged]
    return joined


def merge(first: Box, second: Box) -> Box | None:
    """One box made of both, where `second` follows `first` along one dim and agrees on all others."""
    differing = [
        dim
        for dim, (a, b) in enumerate(
            zip(
                zip(first.offsets, first.lengths, strict=True),
                zip(second.offsets, second.lengths, strict=True),
                strict=True,
            )
        )
        if a != b
    ]
    if len(differing) != 1:
        return None
    (dim,) = differing
    if first.offsets[dim] + first.lengths[dim] != second.offsets[dim]:
        return None
    lengths = list(first.lengths)
    lengths[dim] += second.lengths[dim]
    return Box(first.offsets, tuple(lengths))
