"""The plan: every move that turns one generation's layout into the next one's, as one immutable value.

One process a slot takes part in a handover; `ranks` of the plan are these processes, numbered in the order of their
slots. `plan.for_rank(r)` is a view of the one global plan: nobody plans relative to a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ray_etc.planners.boxes import Box
from ray_etc.planners.check import check
from ray_etc.planners.explain import explain, explain_html
from ray_etc.planners.layout import RankLayout


@dataclass(frozen=True, slots=True)
class Move:
    """Copy `box` (logical coordinates) from a shard of the old layout to a shard of the new one.

    `src_shard` and `dst_shard` are positions in the layouts of `src_rank` and `dst_rank`. Where `is_relay`, the source
    is a shard of the new layout of `src_rank` instead, which received these bytes in an earlier round.
    """

    src_rank: int
    src_shard: int
    dst_rank: int
    dst_shard: int
    box: Box
    nbytes: int
    is_relay: bool = False

    @property
    def is_local(self) -> bool:
        return self.src_rank == self.dst_rank


@dataclass(frozen=True, slots=True)
class RankRound:
    """What one rank sends and receives in one round: to and from each peer one message, packed in this order."""

    sends: Mapping[int, tuple[Move, ...]]
    receives: Mapping[int, tuple[Move, ...]]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's part of a plan."""

    rank: int
    local: tuple[Move, ...]
    rounds: tuple[RankRound, ...]


@dataclass(frozen=True)
class MigrationPlan:
    """Every move between two layouts, local ones apart, wire ones in rounds.

    `source[r]` and `target[r]` are what slot `slots[r]` holds before and after; `nodes[r]` is its node.
    `nbytes_lower_bound` is the least that any placement of the new ranks on these slots would put on the wire.
    `staging_nbytes` bounds what a rank sends, and what it receives, in one round.
    """

    slots: tuple[int, ...]
    nodes: tuple[str, ...]
    source: tuple[RankLayout, ...]
    target: tuple[RankLayout, ...]
    local: tuple[Move, ...]
    rounds: tuple[tuple[Move, ...], ...]
    nbytes_lower_bound: int
    staging_nbytes: int

    @property
    def nbytes_local(self) -> int:
        return sum(move.nbytes for move in self.local)

    @property
    def nbytes_wire(self) -> int:
        return sum(move.nbytes for moves in self.rounds for move in moves)

    def for_rank(self, rank: int) -> RankPlan:
        """The part of slot `slots[rank]`: its local copies and, round by round, its messages."""
        rounds = []
        for moves in self.rounds:
            sends: dict[int, list[Move]] = {}
            receives: dict[int, list[Move]] = {}
            for move in moves:
                if move.src_rank == rank:
                    sends.setdefault(move.dst_rank, []).append(move)
                if move.dst_rank == rank:
                    receives.setdefault(move.src_rank, []).append(move)
            rounds.append(
                RankRound(
                    {peer: tuple(part) for peer, part in sends.items()},
                    {peer: tuple(part) for peer, part in receives.items()},
                )
            )
        return RankPlan(rank, tuple(move for move in self.local if move.dst_rank == rank), tuple(rounds))

    def check(self) -> None:
        """Prove that each target element is written exactly once, from a shard that holds it; else raise PlanError."""
        check(self)

    def explain(self) -> str:
        """What would move, in words and a text table."""
        return explain(self)

    def _repr_html_(self) -> str:
        return explain_html(self)
