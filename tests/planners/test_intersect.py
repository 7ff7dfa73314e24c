"""Arrays of boxes against boxes one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_etc.planners.boxes import Box
from ray_etc.planners.intersect import BoxArray, distinct, join, ragged, ranges

Boxes = list[tuple[int, Box]]


@st.composite
def boxes(draw: st.DrawFn, ndim: int, extent: int, groups: int) -> Boxes:
    found = []
    for _ in range(draw(st.integers(0, 12))):
        offsets = tuple(draw(st.integers(0, extent - 1)) for _ in range(ndim))
        lengths = tuple(draw(st.integers(1, extent - offset)) for offset in offsets)
        found.append((draw(st.integers(0, groups - 1)), Box(offsets, lengths)))
    return found


def as_array(found: Boxes, ndim: int) -> BoxArray:
    return BoxArray(
        np.array([group for group, _ in found], dtype=np.int64),
        np.array([box.offsets for _, box in found], dtype=np.int64).reshape(-1, ndim),
        np.array([box.lengths for _, box in found], dtype=np.int64).reshape(-1, ndim),
    )


# The largest have more elements, over all groups, than 64 bits can number; and the two sides' last groups differ.
@settings(deadline=None, max_examples=300)
@pytest.mark.parametrize(
    ("ndim", "extent", "groups"), [(1, 9, 2), (2, 4, 3), (3, 3, 2), (2, 2**20, 5), (3, 2**21, 2), (3, 2**20, 2**30)]
)
@given(data=st.data())
def test_join_finds_every_pair_that_meets(ndim: int, extent: int, groups: int, data: st.DataObject) -> None:
    first, second = (data.draw(boxes(ndim, extent, groups)) for _ in range(2))
    a, b, common = join(as_array(first, ndim), as_array(second, ndim))
    found = [
        (i, j, Box(tuple(offsets), tuple(lengths)))
        for i, j, offsets, lengths in zip(
            a.tolist(), b.tolist(), common.offsets.tolist(), common.lengths.tolist(), strict=True
        )
    ]
    expected = [
        (i, j, part)
        for i, (group, box) in enumerate(first)
        for j, (other, with_it) in enumerate(second)
        if group == other and (part := box.intersect(with_it)) is not None
    ]
    assert sorted(found) == sorted(expected)
    assert [i for i, _, _ in found] == sorted(i for i, _, _ in found)
    assert common.group.tolist() == [first[i][0] for i, _, _ in found]


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 2**60)), max_size=30))
def test_distinct_rows(rows: list[tuple[int, int]]) -> None:
    table = np.array(rows, dtype=np.int64).reshape(-1, 2)
    first, number = distinct(table[:, 0], table[:, 1:])
    assert len(first) == len(set(rows))
    assert [tuple(table[first[n]].tolist()) for n in number] == rows
    assert all(rows.index(rows[position]) == position for position in first.tolist())


def test_ragged_and_ranges() -> None:
    owner, place = ragged(np.array([2, 0, 3]))
    assert owner.tolist() == [0, 0, 2, 2, 2]
    assert place.tolist() == [0, 1, 0, 1, 2]
    owner, numbers = ranges(np.array([5, 9, 1]), np.array([2, 0, 1]))
    assert (owner.tolist(), numbers.tolist()) == ([0, 0, 2], [5, 6, 1])
