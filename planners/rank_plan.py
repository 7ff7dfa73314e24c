"""One rank's part of a plan, by itself: a rank loads this, and nothing of what made the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ray_etc.planners.boxes import Box


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
    """One rank's part of a plan. `casts` come last: from one shard of its new layout to another of a smaller dtype."""

    rank: int
    local: tuple[Move, ...]
    rounds: tuple[RankRound, ...]
    casts: tuple[Move, ...] = ()
