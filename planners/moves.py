"""Moves as arrays: the chunks of streams turned into boxes, and what stays in its slot beside them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from ray_etc.planners.demands import Casts, Local, Streams
from ray_etc.planners.intersect import BoxArray, ranges
from ray_etc.planners.match import Match
from ray_etc.planners.rounds import Chunks

LOCAL = -1
"""The round of a move inside one slot."""

CAST = -2
"""The "round" of what a rank casts from its new main weights, after all rounds."""


@dataclass(frozen=True, eq=False)
class MoveTable:
    """Moves of all tensors of a bundle at once: row i copies a box from one row of a table to one of the target's.

    int64 [moves] each, `offsets` and `lengths` int64 [moves, ndim] in elements of the logical tensor. `source_row` is a
    row of the target's table where `is_relay` (bool [moves]), else of the source's. `round` is LOCAL inside a slot, and
    CAST for what is made from the main weights, which are the `source_row`.
    Moves of one round and pair of ranks are packed in the order of the table.
    """

    bundle: np.ndarray
    source_row: np.ndarray
    target_row: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    round: np.ndarray
    is_relay: np.ndarray

    def __len__(self) -> int:
        return len(self.bundle)

    def __getitem__(self, index: np.ndarray) -> MoveTable:
        return MoveTable(**{each.name: getattr(self, each.name)[index] for each in fields(MoveTable)})

    def and_then(self, others: MoveTable) -> MoveTable:
        return MoveTable(
            **{
                each.name: np.concatenate([getattr(self, each.name), getattr(others, each.name)])
                for each in fields(MoveTable)
            }
        )

    @property
    def boxes(self) -> BoxArray:
        """The boxes, grouped by bundle."""
        return BoxArray(self.bundle, self.offsets, self.lengths)


def local_moves(found: Match, local: Local) -> MoveTable:
    atoms = found.atoms[local.atom]
    count = len(local.atom)
    return MoveTable(
        atoms.group,
        local.source_row,
        local.target_row,
        atoms.offsets,
        atoms.lengths,
        np.full(count, LOCAL),
        np.zeros(count, dtype=bool),
    )


def cast_moves(casts: Casts) -> MoveTable:
    boxes, count = casts.boxes, len(casts.boxes)
    return MoveTable(
        boxes.group,
        casts.master_row,
        casts.target_row,
        boxes.offsets,
        boxes.lengths,
        np.full(count, CAST),
        np.ones(count, dtype=bool),
    )


def wire_moves(streams: Streams, chunks: Chunks) -> MoveTable:
    """The boxes of all chunks, in the order of rounds, and within a round of streams."""
    order = np.lexsort((chunks.start, chunks.dst, chunks.src, chunks.round))
    start, stop = chunks.start[order], chunks.stop[order]
    first = np.searchsorted(streams.unit_start, start, side="right") - 1
    last = np.searchsorted(streams.unit_start, stop, side="left")
    chunk, part = ranges(first, last - first)
    low = np.maximum(start[chunk], streams.unit_start[part]) - streams.unit_start[part]
    high = np.minimum(stop[chunk], streams.unit_start[part + 1]) - streams.unit_start[part]
    offsets, lengths = streams.parts.offsets[part].copy(), streams.parts.lengths[part].copy()
    rows = np.arange(len(part))
    offsets[rows, streams.dim[part]] += low
    lengths[rows, streams.dim[part]] = high - low

    stream = chunks.stream[order][chunk]
    is_relay = chunks.turn[order][chunk] > 1
    sender, receiver = chunks.src[order][chunk], chunks.dst[order][chunk]
    wanters = _place_in(streams.wanters_of, stream, receiver)
    relays = _place_in(streams.wanters_of, stream[is_relay], sender[is_relay])
    holders = _place_in(streams.holders_of, stream[~is_relay], sender[~is_relay])
    source_row = np.empty(len(part), dtype=np.int64)
    source_row[is_relay] = streams.wanter_row[1][streams.wanter_row[0][part[is_relay]] + relays]
    source_row[~is_relay] = streams.holder_row[1][streams.holder_row[0][part[~is_relay]] + holders]
    return MoveTable(
        streams.parts.group[part],
        source_row,
        streams.wanter_row[1][streams.wanter_row[0][part] + wanters],
        offsets,
        lengths,
        chunks.round[order][chunk],
        is_relay,
    )


def _place_in(lists: tuple[np.ndarray, np.ndarray], stream: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """The place of `rank[i]` in the rising list of ranks of class `stream[i]`."""
    first, ranks = lists
    owner = np.repeat(np.arange(len(first) - 1), np.diff(first))
    width = int(ranks.max(initial=0)) + 1
    return np.searchsorted(owner * width + ranks, stream * width + rank) - first[stream]
