"""Rounds: the hops cut into chunks, each in a round, within the staging memory of every rank.

In a round every rank posts all of its sends and receives at once, so no order of ranks can deadlock. Every pair of
ranks spreads its bytes evenly over all rounds, so that the busiest rank is as busy in each round as it may be, and
there are hardly more rounds than it needs; pairs with little to say speak in few rounds, in turn. What is handed on
goes one round after it came.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ray_etc.planners.demands import Streams
from ray_etc.planners.fan_out import Hops
from ray_etc.planners.intersect import ragged, ranges

CHUNKS_PER_BUDGET = 48
"""Bytes on one way are not cut into smaller chunks than this share of the budget, so that messages stay large; nor into
larger ones, unless in every round, so that rounds fill well."""


SLACK = 0.04
"""Share of rounds that are added where whole units do not fill the fewest rounds exactly."""


@dataclass(frozen=True, eq=False)
class Chunks:
    """Units [start, stop) of all streams end to end on their way from rank to rank in one round: int64 each."""

    stream: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    turn: np.ndarray
    round: np.ndarray


def split_rounds(hops: Hops, streams: Streams, urgent: np.ndarray, world_size: int, staging_nbytes: int) -> Chunks:
    """Cut `hops` into chunks and give each a round.

    In no round does a rank send, nor receive, more than `staging_nbytes` bytes. Segments of which `urgent` (bool
    [segments]) is true go before all others of the same ranks.
    """
    order = np.argsort(hops.segment, kind="stable")
    edges = np.searchsorted(hops.segment[order], np.arange(len(urgent) + 1))
    one_hop = order[edges[:-1]]
    depth = np.ones(len(urgent), dtype=np.int64)
    np.maximum.at(depth, hops.segment, hops.turn)
    segments = _Segments(
        streams.unit_at(hops.start[one_hop]),
        streams.unit_at(hops.stop[one_hop]),
        (hops.dst[one_hop] - hops.src[one_hop]) % world_size,
        depth,
    )
    is_urgent = urgent[hops.segment]
    first_rounds = _least_rounds(hops, is_urgent, world_size, staging_nbytes)
    last_rounds = _least_rounds(hops, ~is_urgent, world_size, staging_nbytes)
    hurried = np.zeros(world_size, dtype=bool)
    hurried[hops.src[is_urgent]] = hurried[hops.dst[is_urgent]] = True
    waits = np.zeros(len(urgent), dtype=bool)
    np.logical_or.at(waits, hops.segment, (hurried[hops.src] | hurried[hops.dst]) & ~is_urgent)

    for slack in (0.0, SLACK):
        first, last = (rounds + int(np.ceil(slack * rounds)) for rounds in (first_rounds, last_rounds))
        earliest = np.where(waits, first, 0)
        number, start, stop, begin = _spread(segments, streams, np.where(urgent, first, last), earliest, staging_nbytes)
        chunk, place = ranges(edges[number], np.diff(edges)[number])
        hop = order[place]
        columns = (start[chunk], stop[chunk], hops.src[hop], hops.dst[hop], hops.turn[hop])
        chunks = Chunks(hops.stream[hop], *columns, begin[chunk] + hops.turn[hop] - 1)
        nbytes = (streams.nbytes_at(stop) - streams.nbytes_at(start))[chunk]
        load = _load(chunks, nbytes, world_size)
        if (load <= staging_nbytes).all():
            return chunks
    return _within_budget(chunks, chunk, earliest[number], nbytes, load, staging_nbytes)


@dataclass(frozen=True, eq=False)
class _Segments:
    """The units [start, stop) of each segment, how far round the ring of ranks its first hop goes, and in how many
    turns it reaches all: int64 each."""

    start: np.ndarray
    stop: np.ndarray
    ring: np.ndarray
    depth: np.ndarray


def _spread(
    segments: _Segments, streams: Streams, rounds: np.ndarray, earliest: np.ndarray, staging_nbytes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Chunks of all segments, evenly over `rounds[s]` rounds from `earliest[s]` on: segment, units, and first round.

    Segments take turns round the ring, so that the odd larger or lonely chunks of a rank are not all in one round.
    """
    origin = streams.nbytes_at(segments.start)
    nbytes = streams.nbytes_at(segments.stop) - origin
    # A chunk, and what rounding its ends to whole units adds, must fit into a round.
    room = staging_nbytes - int(streams.unit_nbytes.max(initial=0))
    at_least = np.where(nbytes <= staging_nbytes, 1, -(-nbytes // room))
    count = np.clip(nbytes // (staging_nbytes // CHUNKS_PER_BUDGET + 1), at_least, np.maximum(rounds, at_least))
    number, index = ragged(count)
    start = streams.unit_at(origin[number] + nbytes[number] * index / count[number])
    stop = streams.unit_at(origin[number] + nbytes[number] * (index + 1) / count[number])
    # A lonely chunk that is handed on begins early enough to be everywhere by the last round.
    window = np.where(count == 1, rounds - segments.depth + 1, rounds)[number]
    begin = (index * rounds[number] // count[number] + segments.ring[number]) % np.maximum(window, 1)
    there = stop > start
    return number[there], start[there], stop[there], (earliest[number] + begin)[there]


def _least_rounds(hops: Hops, among: np.ndarray, world_size: int, staging_nbytes: int) -> int:
    """The rounds that the busiest rank needs for some of the hops (bool [hops])."""
    nbytes = (hops.stop - hops.start)[among]
    busiest = max(float(np.bincount(end[among], nbytes, world_size).max(initial=0.0)) for end in (hops.src, hops.dst))
    return int(np.ceil(busiest / staging_nbytes))


def _load(chunks: Chunks, nbytes: np.ndarray, world_size: int) -> np.ndarray:
    """Bytes of each rank and round: int64 [2 * world_size, rounds], first what ranks send, then what they receive."""
    load = np.zeros((2 * world_size, int(chunks.round.max(initial=0)) + 1), dtype=np.int64)
    for end in (chunks.src, world_size + chunks.dst):
        np.add.at(load, (end, chunks.round), nbytes)
    return load


def _within_budget(
    chunks: Chunks, number: np.ndarray, earliest: np.ndarray, nbytes: np.ndarray, load: np.ndarray, staging_nbytes: int
) -> Chunks:
    """`chunks` with some moved to other rounds, where they are too much for a rank in theirs.

    Entry i is one hop of chunk `number[i]`, of `nbytes[i]` bytes; chunk c may not go before round `earliest[c]`. Whole
    units do not share out evenly, so a few chunks do not fit where they are; each of their hops goes to the first round
    that has room and comes after the hop before.
    """
    world_size = len(load) // 2
    over = load > staging_nbytes
    suspects = np.unique(number[over[chunks.src, chunks.round] | over[world_size + chunks.dst, chunks.round]])
    order = np.lexsort((chunks.turn, number))
    edges = np.searchsorted(number[order], suspects)
    ends = np.searchsorted(number[order], suspects, side="right")
    rounds = chunks.round.copy()
    for which in np.argsort(-nbytes[order[edges]], kind="stable").tolist():
        entries = order[edges[which] : ends[which]].tolist()
        cells = [(row, int(rounds[i])) for i in entries for row in (chunks.src[i], world_size + chunks.dst[i])]
        if all(load[cell] <= staging_nbytes for cell in cells):
            continue
        for cell in cells:
            load[cell] -= nbytes[entries[0]]
        arrived: dict[int, int] = {}
        for i in entries:
            src, dst = int(chunks.src[i]), int(chunks.dst[i])
            first = arrived[src] + 1 if chunks.turn[i] > 1 else int(earliest[number[i]])
            if first >= load.shape[1]:
                load = np.pad(load, ((0, 0), (0, first + 1 - load.shape[1])))
            both = np.maximum(load[src, first:], load[world_size + dst, first:])
            fits = np.flatnonzero(both + nbytes[i] <= staging_nbytes)
            if not len(fits):
                load = np.pad(load, ((0, 0), (0, 1)))
            rounds[i] = arrived[dst] = first + int(fits[0]) if len(fits) else load.shape[1] - 1
            load[src, rounds[i]] += nbytes[i]
            load[world_size + dst, rounds[i]] += nbytes[i]
    return replace(chunks, round=rounds)
