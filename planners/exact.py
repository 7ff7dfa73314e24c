"""Few groups: every way to spread them over nodes is tried."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ray_etc.planners.matching import best_matching

Pairs = tuple[tuple[int, int], ...]
"""(rank, column) for each rank of a set, in the order of ranks."""


def try_every_spread(
    overlap: np.ndarray, units: Sequence[Sequence[int]], node_columns: Sequence[Sequence[int]]
) -> list[int] | None:
    """The best column of each rank with whole units, or None where they do not fit.

    Best is: on the fewest nodes, then most bytes, then first in order. `overlap` is int64 [ranks, columns], in bytes.

    Nodes are taken one by one. For each set of units placed so far only the best is kept. What a node adds does not
    depend on how the units before it were placed, so the best of each set is part of the best of all.
    """
    best: dict[int, tuple[int, int, Pairs]] = {0: (0, 0, ())}
    everything = (1 << len(units)) - 1
    for columns in node_columns:
        placed: dict[int, tuple[int, Pairs]] = {}
        for chosen in range(1, everything + 1):
            ranks = [rank for index, unit in enumerate(units) if chosen >> index & 1 for rank in unit]
            if len(ranks) <= len(columns):
                placed[chosen] = _place(overlap, ranks, columns)
        after = dict(best)
        for done, (nodes, lost, pairs) in best.items():
            for chosen, (kept, new_pairs) in placed.items():
                if done & chosen:
                    continue
                rival = after.get(done | chosen)
                if rival is not None and (rival[0], rival[1]) < (nodes + 1, lost - kept):
                    continue
                candidate = (nodes + 1, lost - kept, tuple(sorted(pairs + new_pairs)))
                if rival is None or candidate < rival:
                    after[done | chosen] = candidate
        best = after
    return [column for _, column in best[everything][2]] if everything in best else None


def _place(overlap: np.ndarray, ranks: Iterable[int], columns: Sequence[int]) -> tuple[int, Pairs]:
    """The best of `ranks` on `columns` of one node, with the bytes kept."""
    rows = sorted(ranks)
    part = overlap[np.ix_(rows, columns)]
    chosen = best_matching(part)
    kept = int(part[range(len(rows)), chosen].sum())
    return kept, tuple((rank, columns[column]) for rank, column in zip(rows, chosen, strict=True))
