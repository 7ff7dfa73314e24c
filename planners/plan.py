"""The plan: every move that turns one generation's layout into the next one's, as one immutable value.

One process a slot takes part in a handover; `ranks` of the plan are these processes, numbered in the order of their
slots. `plan.for_rank(r)` is a view of the one global plan: nobody plans relative to a rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ray_etc.planners.boxes import Box
from ray_etc.planners.check import check
from ray_etc.planners.explain import explain, explain_html
from ray_etc.planners.links import Links
from ray_etc.planners.match import Bundle
from ray_etc.planners.moves import CAST, LOCAL, MoveTable
from ray_etc.planners.rank_plan import Move, RankPlan, RankRound
from ray_etc.planners.table import LayoutTable


@dataclass(frozen=True, eq=False)
class MigrationPlan:
    """Every move between two layouts, local ones apart, wire ones in rounds.

    `source[r]` and `target[r]` are what slot `slots[r]` holds before and after; `nodes[r]` is its node. `moves` are for
    all tensors of a bundle at once; `local`, `rounds` and `for_rank` list them one by one.
    `nbytes_lower_bound` is the least that any placement of the new ranks on these slots would put on the wire.
    `staging_nbytes` bounds what a rank sends, and what it receives, in one round. `endangered` are ranks whose slots
    will go: what nobody else holds leaves them first.
    """

    slots: tuple[int, ...]
    nodes: tuple[str, ...]
    source: LayoutTable
    target: LayoutTable
    bundles: tuple[Bundle, ...]
    moves: MoveTable
    nbytes_lower_bound: int
    staging_nbytes: int
    endangered: tuple[int, ...] = ()

    @cached_property
    def move_nbytes(self) -> np.ndarray:
        """Bytes of each row of `moves`: int64."""
        element = np.array([bundle.element_nbytes for bundle in self.bundles], dtype=np.int64)
        return self.moves.lengths.prod(axis=1) * element[self.moves.bundle]

    @cached_property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """The ranks that each row of `moves` leaves and reaches: int64 each."""
        moves = self.moves
        dst = self.target.rank[moves.target_row]
        src = np.empty_like(dst)
        src[moves.is_relay] = self.target.rank[moves.source_row[moves.is_relay]]
        src[~moves.is_relay] = self.source.rank[moves.source_row[~moves.is_relay]]
        return src, dst

    @property
    def nbytes_local(self) -> int:
        return int(self.move_nbytes[self.moves.round == LOCAL].sum())

    @property
    def nbytes_wire(self) -> int:
        return int(self.move_nbytes[self.moves.round >= 0].sum())

    @property
    def nbytes_cast(self) -> int:
        """What ranks make from the main weights they have then, and nobody sends."""
        return int(self.move_nbytes[self.moves.round == CAST].sum())

    @property
    def round_count(self) -> int:
        return max(0, int(self.moves.round.max(initial=LOCAL)) + 1)

    @cached_property
    def local(self) -> tuple[Move, ...]:
        """The moves inside slots, one tensor each."""
        return tuple(self._each(np.flatnonzero(self.moves.round == LOCAL)))

    @cached_property
    def casts(self) -> tuple[Move, ...]:
        """What ranks cast from shards of their new layouts, one tensor each, after all rounds."""
        return tuple(self._each(np.flatnonzero(self.moves.round == CAST)))

    @cached_property
    def rounds(self) -> tuple[tuple[Move, ...], ...]:
        """The moves over the wire, round by round, one tensor each."""
        return tuple(tuple(self._each(np.flatnonzero(self.moves.round == r))) for r in range(self.round_count))

    def message_sizes(self) -> dict[tuple[int, int, int], int]:
        """How many moves each pair has in each round, by (round, source, destination); local in LOCAL."""
        src, dst = self.ends
        rows = np.flatnonzero(self.moves.round >= LOCAL)
        columns = np.column_stack([self.moves.round[rows], src[rows], dst[rows]])
        pairs, where = np.unique(columns, axis=0, return_inverse=True)
        tensors = np.array([len(bundle.tensors) for bundle in self.bundles], dtype=np.int64)[self.moves.bundle[rows]]
        counts = np.bincount(where, tensors, len(pairs)).astype(np.int64)
        return dict(zip(map(tuple, pairs.tolist()), counts.tolist(), strict=True))

    def for_rank(self, rank: int) -> RankPlan:
        """The part of slot `slots[rank]`: its local copies and, round by round, its messages."""
        src, dst = self.ends
        local: list[Move] = []
        casts: list[Move] = []
        sends: list[dict[int, list[Move]]] = [{} for _ in range(self.round_count)]
        receives: list[dict[int, list[Move]]] = [{} for _ in range(self.round_count)]
        for row in self._rows_of(rank):
            moves = self._each([row])
            index = int(self.moves.round[row])
            if index == LOCAL:
                local.extend(moves)
            elif index == CAST:
                casts.extend(moves)
            elif src[row] == rank:
                sends[index].setdefault(int(dst[row]), []).extend(moves)
            else:
                receives[index].setdefault(int(src[row]), []).extend(moves)
        rounds = [
            RankRound(
                {peer: tuple(part) for peer, part in sent.items()},
                {peer: tuple(part) for peer, part in received.items()},
            )
            for sent, received in zip(sends, receives, strict=True)
        ]
        return RankPlan(rank, tuple(local), tuple(rounds), tuple(casts))

    def _rows_of(self, rank: int) -> list[int]:
        """The rows of `moves` that begin or end on a rank, in their order."""
        rows, edges = self._rows_by_rank
        return sorted(set(rows[edges[rank] : edges[rank + 1]].tolist()))

    @cached_property
    def _rows_by_rank(self) -> tuple[np.ndarray, np.ndarray]:
        ends = np.concatenate(self.ends)
        order = np.argsort(ends, kind="stable")
        return order % max(len(self.moves), 1), np.searchsorted(ends[order], np.arange(len(self.slots) + 1))

    def _each(self, rows: Iterable[int]) -> list[Move]:
        """The moves that rows of the table stand for, one a tensor."""
        found = []
        for row in map(int, rows):
            bundle = self.bundles[self.moves.bundle[row]]
            ndim = len(bundle.tensors[0].shape)
            box = Box(tuple(self.moves.offsets[row, :ndim].tolist()), tuple(self.moves.lengths[row, :ndim].tolist()))
            is_relay = bool(self.moves.is_relay[row])
            origin = self.target if is_relay else self.source
            source_row, target_row = int(self.moves.source_row[row]), int(self.moves.target_row[row])
            numel = box.numel
            is_cast = self.moves.round[row] == CAST
            for tensor in bundle.tensors:
                source_key = (tensor.derived_from or tensor.kind, tensor.name) if is_cast else tensor.key
                found.append(
                    Move(
                        int(origin.rank[source_row]),
                        origin.shard_position(source_row, source_key),
                        int(self.target.rank[target_row]),
                        self.target.shard_position(target_row, tensor.key),
                        box,
                        numel * tensor.itemsize,
                        is_relay,
                    )
                )
        return found

    def check(self) -> None:
        """Prove that each target element is written exactly once, from a shard that holds it; else raise PlanError."""
        check(self)

    def explain(self, links: Links | None = None, deadline_s: float | None = None) -> str:
        """What would move, in words and text tables; see planners/explain.py."""
        return explain(self, links, deadline_s)

    def __str__(self) -> str:
        return self.explain()

    def _repr_html_(self) -> str:
        return explain_html(self)
