"""Boxes as arrays: which boxes of two lists meet, and which rows of an array are the same."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

CANDIDATES_AT_ONCE = 4_000_000
"""Pairs that are looked at together: some 300 MB of numbers."""


@dataclass(frozen=True, eq=False)
class BoxArray:
    """Many boxes: `group` is int64 [boxes], `offsets` and `lengths` int64 [boxes, ndim], in elements.

    Only boxes of one group are ever compared. No box is empty.
    """

    group: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.group)

    def __getitem__(self, index: Any) -> BoxArray:
        return BoxArray(self.group[index], self.offsets[index], self.lengths[index])

    @property
    def numel(self) -> np.ndarray:
        """int64 [boxes]."""
        return self.lengths.prod(axis=1)


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For lists of `counts[i]` things laid end to end: the list of each thing, and its place in that list."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def ranges(starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The whole numbers of each range [starts[i], starts[i] + counts[i]) end to end, with the range of each."""
    owner, place = ragged(counts)
    return owner, starts[owner] + place


def join(first: BoxArray, second: BoxArray) -> tuple[np.ndarray, np.ndarray, BoxArray]:
    """Every pair of boxes of one group that share an element: both positions (int64 [pairs]), and what they share.

    A sweep in row-major order finds the candidates, so the work is near-linear where boxes lie one after the other in
    it. Pairs are in the order of `first`.
    """
    if not len(first) or not len(second):
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing, first[nothing]
    spans = _spans_in_64_bits(first, second)
    wanted, wanted_last = _in_row_major_order(first, spans)
    start, last = _in_row_major_order(second, spans)
    order = np.argsort(start, kind="stable")
    start = start[order]
    # Ends of sorted boxes need not rise; the highest so far tells where a box that reaches far enough may begin.
    reach = np.maximum.accumulate(last[order])
    low = np.searchsorted(reach, wanted, side="left")
    counts = np.maximum(np.searchsorted(start, wanted_last, side="right") - low, 0)
    found = []
    for part in _portions(counts):
        owner, place = ranges(low[part], counts[part])
        a, b = owner + part.start, order[place]
        offsets = np.maximum(first.offsets[a], second.offsets[b])
        stops = np.minimum(first.offsets[a] + first.lengths[a], second.offsets[b] + second.lengths[b])
        meets = (stops > offsets).all(axis=1)
        a, b, offsets, stops = a[meets], b[meets], offsets[meets], stops[meets]
        found.append((a, b, offsets, stops - offsets))
    a, b, offsets, lengths = (np.concatenate(column) for column in zip(*found, strict=True))
    return a, b, BoxArray(first.group[a], offsets, lengths)


def _in_row_major_order(boxes: BoxArray, spans: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Where the first and the last element of each box is, group by group in tensors of `spans`: int64 each.

    Boxes that share an element overlap there too.
    """
    first, last = boxes.group, boxes.group
    for dim, span in enumerate(spans):
        first = first * span + boxes.offsets[:, dim]
        last = last * span + boxes.offsets[:, dim] + boxes.lengths[:, dim] - 1
    return first, last


def _spans_in_64_bits(*sides: BoxArray) -> list[int]:
    """The extent of all boxes along each dim, without the last ones where an element's number would not fit."""
    largest = np.max([(boxes.offsets + boxes.lengths).max(axis=0) for boxes in sides], axis=0).tolist()
    room = 2**62 // (1 + max(int(boxes.group.max()) for boxes in sides))
    spans = []
    for span in largest:
        room //= span
        if not room:
            break
        spans.append(span)
    return spans


def _portions(counts: np.ndarray) -> list[slice]:
    """Consecutive entries with about CANDIDATES_AT_ONCE candidates in all."""
    ends = np.cumsum(counts)
    cuts = np.searchsorted(ends, np.arange(CANDIDATES_AT_ONCE, int(ends[-1]) + 1, CANDIDATES_AT_ONCE), side="right")
    edges = np.unique(np.concatenate([[0], cuts, [len(counts)]])).tolist()
    return [slice(a, b) for a, b in pairwise(edges)]


def distinct(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows of `columns` (each int64 [n] or [n, k]): the first of each, and for every row its number.

    Distinct rows are numbered in an order that only depends on the values. Rows are told apart by a hash, and then
    compared for certain.
    """
    table = np.column_stack(columns)
    key = mixed(table)
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    if not np.array_equal(table[first][number], table):
        _, first, number = np.unique(table, axis=0, return_index=True, return_inverse=True)
    return first, number


def mixed(table: np.ndarray) -> np.ndarray:
    """A well-spread hash of each row of int64 [n, k]: uint64 [n]."""
    key = np.full(len(table), 0x243F6A8885A308D3, dtype=np.uint64)
    for column in table.T:
        key = (key ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(29)
        key *= np.uint64(0xBF58476D1CE4E5B9)
        key ^= key >> np.uint64(32)
    return key


def hash_of_sets(owner: np.ndarray, member: np.ndarray, count: int) -> np.ndarray:
    """A hash of the set of `member[i]` over all i with `owner[i] == o`, for each o below `count`: uint64 [count, 2].

    The order of members does not matter. Two sums of well-spread hashes: sets of equal hashes are taken for equal.
    """
    sums = np.zeros((count, 2), dtype=np.uint64)
    for salt in range(2):
        np.add.at(sums[:, salt], owner, mixed(np.column_stack([np.full(len(member), salt), member])))
    return sums
