"""Fan-out: by which hops each stream reaches all who want it, so that the time does not grow with their number.

Where more ranks of a node want the same bytes than hold them there, each fetches one share and hands it on to the
others: bytes cross the network once a node, over the NICs of all who want them. Where more nodes want them than
holders can serve, the nodes do the same among each other. Shares too small to be worth a message go whole, down a
tree. On broadcasts that are split see Zhuang et al., On Optimizing the Communication of Model Parallelism
(arXiv 2211.05322).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from ray_etc.planners.balance import Network
from ray_etc.planners.demands import Streams
from ray_etc.planners.intersect import ranges

FAR_CHOICES = 8
"""Holders on other nodes that are considered for one share; they take turns, so that all are considered for some."""

WORTH_RELAYING = 1.25
"""Nodes hand bytes on to each other only where holders alone would take this much longer."""


@dataclass
class Ways:
    """Every share of every stream, who may send it first, and who hands it on.

    A share is bytes [start, stop) of all streams end to end, for the rank `first`. The options of share i are
    `options[i]`, ranks that hold it. A hop (share, src, dst, turn) hands the share on; turn 2 follows the first
    arrival, turn 3 a hop of turn 2, and so on.
    """

    start: list[float] = field(default_factory=list)
    stop: list[float] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    options: list[np.ndarray] = field(default_factory=list)
    hops: list[tuple[int, int, int, int]] = field(default_factory=list)

    def add(self, stream: int, start: float, stop: float, first: int, options: np.ndarray) -> int:
        self.start.append(start)
        self.stop.append(stop)
        self.stream.append(stream)
        self.first.append(first)
        self.options.append(options)
        return len(self.start) - 1


def fan_out(streams: Streams, network: Network, *, relays: bool = True) -> Ways:
    """The ways of all streams that have any choice (see `direct_hops` for the others).

    Without `relays` nobody hands anything on.
    """
    return _FanOut(streams, network, relays).ways()


class _FanOut:
    def __init__(self, streams: Streams, network: Network, relays: bool) -> None:
        self._relays = relays
        self._streams, self._node, self._links = streams, network.node, network.links
        # Below this size the fixed cost of a message is more than its bytes.
        self._least_share = {
            near: self._links.message_s * speed
            for near, speed in ((True, self._links.same_node_bytes_per_s), (False, self._links.nic_bytes_per_s))
        }
        self._turn = 0
        self._ways = Ways()

    def ways(self) -> Ways:
        holders_first, holders = self._streams.holders_of
        wanters_first, wanters = self._streams.wanters_of
        for stream in np.flatnonzero(has_choice(self._streams)).tolist():
            held_by = holders[holders_first[stream] : holders_first[stream + 1]]
            wanted_by = wanters[wanters_first[stream] : wanters_first[stream + 1]]
            start, stop = map(float, self._streams.class_start[stream : stream + 2])
            if len(wanted_by) == 1 or not self._relays:
                for rank in wanted_by.tolist():
                    self._ways.add(stream, start, stop, rank, self._options(held_by, rank))
            else:
                self._spread(stream, start, stop, held_by, wanted_by)
        return self._ways

    def _options(self, holders: np.ndarray, rank: int) -> np.ndarray:
        """The holders that may send to `rank`: those of its node, and some of the others in turn."""
        if len(holders) <= FAR_CHOICES:
            return holders
        near = self._node[holders] == self._node[rank]
        far = holders[~near]
        picked = (self._turn + np.arange(min(FAR_CHOICES, len(far)))) % max(len(far), 1)
        self._turn += FAR_CHOICES
        return np.concatenate([holders[near][:FAR_CHOICES], far[np.sort(picked)]])

    def _spread(self, stream: int, start: float, stop: float, holders: np.ndarray, wanters: np.ndarray) -> None:
        """One stream for several ranks."""
        by_node: dict[int, list[int]] = {}
        for rank in wanters.tolist():
            by_node.setdefault(int(self._node[rank]), []).append(rank)
        held_on = np.bincount(self._node[holders], minlength=int(self._node.max()) + 1)
        without = {node: ranks for node, ranks in by_node.items() if not held_on[node]}
        for node, ranks in by_node.items():
            if node not in without:
                self._inside(stream, start, stop, holders, ranks, whole=len(ranks) <= held_on[node])
        if not without:
            return
        nbytes = stop - start
        holder_nbytes = len(without) * nbytes / len(holders)
        wanter_nbytes = nbytes / min(len(ranks) for ranks in without.values())
        if len(without) > 1 and holder_nbytes > WORTH_RELAYING * wanter_nbytes:
            self._between(stream, start, stop, holders, list(without.values()))
        else:
            for ranks in without.values():
                self._inside(stream, start, stop, holders, ranks, whole=False)

    def _inside(
        self, stream: int, start: float, stop: float, holders: np.ndarray, ranks: list[int], *, whole: bool
    ) -> None:
        """One node: each of `ranks` takes a share from the holders and gives it to the others; or all, if `whole`."""
        if whole:
            for rank in ranks:
                self._ways.add(stream, start, stop, rank, self._options(holders, rank))
            return
        count = self._share_count(stop - start, len(ranks), near=True)
        for index in range(count):
            low, high = _portion(start, stop, index, count)
            share = self._ways.add(stream, low, high, ranks[index], self._options(holders, ranks[index]))
            self._hand_on(share, ranks[index:] + ranks[:index], 2, is_split=count == len(ranks))

    def _between(self, stream: int, start: float, stop: float, holders: np.ndarray, nodes: Sequence[list[int]]) -> None:
        """Several nodes: each share arrives on one of them, which hands it on to the others, each to its own ranks."""
        largest = max(len(ranks) for ranks in nodes)
        count = self._share_count(stop - start, len(nodes) * largest, near=False)
        for index in range(count):
            home, place = index % len(nodes), index // len(nodes)
            entries = [ranks[place % len(ranks)] for ranks in (*nodes[home:], *nodes[:home])]
            low, high = _portion(start, stop, index, count)
            share = self._ways.add(stream, low, high, entries[0], self._options(holders, entries[0]))
            turns = self._hand_on(share, entries, 2, is_split=count >= len(nodes))
            for ranks, entry, turn in zip((*nodes[home:], *nodes[:home]), entries, turns, strict=True):
                others = [rank for rank in ranks if rank != entry]
                self._hand_on(share, [entry, *others], turn + 1, is_split=count >= len(nodes) * len(ranks))

    def _hand_on(self, share: int, ranks: list[int], turn: int, *, is_split: bool) -> list[int]:
        """From ranks[0] to the others: by itself where each of them has a share to give as well, else down a tree.

        Returns the turn by which each has it; `turn` is the first free one.
        """
        turns = [turn - 1]
        for position in range(1, len(ranks)):
            parent = 0 if is_split else (position - 1) // 2
            turns.append(turns[parent] + 1)
            self._ways.hops.append((share, ranks[parent], ranks[position], turns[position]))
        return turns

    def _share_count(self, nbytes: float, at_most: int, *, near: bool) -> int:
        return int(min(at_most, max(1, nbytes // max(self._least_share[near], 1))))


def _portion(start: float, stop: float, index: int, count: int) -> tuple[float, float]:
    return start + (stop - start) * index / count, start + (stop - start) * (index + 1) / count


@dataclass(frozen=True, eq=False)
class Hops:
    """Bytes [start, stop) of all streams end to end, from rank to rank: float64 and int64 [hops].

    Hops of one `segment` carry the same bytes; those of a later `turn` hand on what the earlier ones brought. `stream`
    is the number of the class.
    """

    segment: np.ndarray
    stream: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    turn: np.ndarray

    def and_then(self, others: Hops) -> Hops:
        """Both, with segments of their own."""
        first = int(self.segment.max(initial=-1)) + 1
        columns = {
            each.name: np.concatenate([getattr(self, each.name), getattr(others, each.name)]) for each in fields(Hops)
        }
        columns["segment"][len(self.segment) :] += first
        return Hops(**columns)


def has_choice(streams: Streams) -> np.ndarray:
    """Whether a stream has several holders, or several ranks want it: bool [classes]."""
    return (np.diff(streams.holders_of[0]) > 1) | (np.diff(streams.wanters_of[0]) > 1)


def direct_hops(streams: Streams) -> Hops:
    """The one hop of each stream that has no choice."""
    stream = np.flatnonzero(~has_choice(streams))
    return Hops(
        segment=np.arange(len(stream)),
        stream=stream,
        start=streams.class_start[stream].astype(np.float64),
        stop=streams.class_start[stream + 1].astype(np.float64),
        src=streams.holders_of[1][streams.holders_of[0][stream]],
        dst=streams.wanters_of[1][streams.wanters_of[0][stream]],
        turn=np.ones(len(stream), dtype=np.int64),
    )


def chosen_hops(ways: Ways, share_of_option: np.ndarray) -> Hops:
    """The hops of `ways`, where `share_of_option` (options end to end) is what each first sender takes."""
    counts = np.array([len(options) for options in ways.options], dtype=np.int64)
    owner = np.repeat(np.arange(len(counts)), counts)
    src = np.concatenate([np.zeros(0, dtype=np.int64), *ways.options])
    start, stop = np.array(ways.start), np.array(ways.stop)
    before = np.cumsum(share_of_option) - share_of_option
    first = np.cumsum(counts) - counts
    before -= before[first][owner] if len(owner) else before
    width = (stop - start)[owner]
    low, high = start[owner] + before * width, start[owner] + (before + share_of_option) * width
    taken = share_of_option > 0
    owner, src, low, high = owner[taken], src[taken], low[taken], high[taken]
    is_last = np.append(owner[1:] != owner[:-1], True)[: len(owner)]
    high[is_last] = stop[owner[is_last]]
    # Sums of shares are rounded: a share that began a hair off the end of the one before could leave out a unit.
    low[1:] = np.where(is_last[:-1], start[owner[1:]], high[:-1])
    low[:1] = start[owner[:1]]
    segment = np.arange(len(owner))
    edges = np.searchsorted(owner, np.arange(len(counts) + 1))
    hops = np.array(ways.hops, dtype=np.int64).reshape(-1, 4)
    which, relayed = ranges(edges[hops[:, 0]], np.diff(edges)[hops[:, 0]])
    segment = np.concatenate([segment, relayed])
    return Hops(
        segment=segment,
        stream=np.array(ways.stream, dtype=np.int64)[owner[segment]],
        start=low[segment],
        stop=high[segment],
        src=np.concatenate([src, hops[which, 1]]),
        dst=np.concatenate([np.array(ways.first, dtype=np.int64)[owner], hops[which, 2]]),
        turn=np.concatenate([np.ones(len(owner), dtype=np.int64), hops[which, 3]]),
    )
