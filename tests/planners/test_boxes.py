"""Boxes, flat ranges and regions against numpy, element by element."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ray_etc.planners.boxes import Box, flat_range_to_boxes
from ray_etc.planners.regions import cut, disjoint, join, subtract

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, length)) for length in shape)
    return Box(offsets, tuple(draw(st.integers(0, length - o)) for o, length in zip(offsets, shape, strict=True)))


@st.composite
def shape_and_boxes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    return shape, [draw(boxes_in(shape)) for _ in range(count)]


def elements(shape: tuple[int, ...], *boxes: Box) -> list[int]:
    """Flat indices of the elements of `boxes`, sorted, with repeats."""
    ids = np.arange(prod(shape)).reshape(shape)
    found: list[int] = []
    for box in boxes:
        index = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
        found += np.ravel(ids[index]).tolist()
    return sorted(found)


@given(shape_and_boxes(2))
def test_intersect_is_the_common_elements(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (a, b) = case
    common = a.intersect(b)
    assert (elements(shape, common) if common else []) == sorted(set(elements(shape, a)) & set(elements(shape, b)))


@given(shape_and_boxes(2))
def test_minus_leaves_the_others_once(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (a, b) = case
    expected = sorted(set(elements(shape, a)) - set(elements(shape, b)))
    common = a.intersect(b)
    if common is not None:
        assert elements(shape, *a.minus(common)) == expected
    assert elements(shape, *subtract([a], b)) == expected


@given(shape_and_boxes(5))
def test_disjoint_is_the_union_once(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    assert elements(shape, *disjoint(boxes)) == sorted(set(elements(shape, *boxes)))


@given(shape_and_boxes(1), st.integers(1, 40))
def test_cut_pieces_fit_and_join_again(case: tuple[tuple[int, ...], list[Box]], max_numel: int) -> None:
    shape, (box,) = case
    pieces = cut(box, max_numel)
    assert all(piece.numel <= max_numel for piece in pieces)
    assert elements(shape, *pieces) == elements(shape, box)
    assert [i for piece in pieces for i in elements(shape, piece)] == elements(shape, box), "not in row-major order"
    assert elements(shape, *join(pieces)) == elements(shape, box)
    if box.numel:
        assert join(pieces) == [box]


@given(shape_and_boxes(1))
def test_slices_and_shifts(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (box,) = case
    ids = np.arange(prod(shape)).reshape(shape)
    assert np.ravel(ids[box.slices_in(Box.whole(shape))]).tolist() == elements(shape, box)
    there = Box(tuple(7 for _ in shape), shape)
    assert box.shifted(there.offsets).slices_in(there) == box.slices_in(Box.whole(shape))


@given(st.data(), SHAPES)
def test_flat_range_becomes_its_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    numel = prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    boxes = flat_range_to_boxes(start, stop, shape)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    position = start
    for box, flat in boxes:
        assert flat == position
        assert elements(shape, box) == list(range(flat, flat + box.numel))
        position += box.numel
    assert position == stop or not boxes
    assert sum(box.numel for box, _ in boxes) == stop - start
