"""A plain reshard, to compare plans with: one tensor at a time, new rank i on slot i, no assignment, no balancing.

This is how PyTorch DCP (`create_read_items_for_chunk_list`) and Megatron-core's resharding go about it: an index from
tensor to the distinct boxes that are held of it, each with its replicas; then, for each new rank and each of its
shards, a loop over the boxes of that tensor that takes what they have in common. As in Megatron, a rank that holds a
box takes it from itself, and replicas are asked in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import RankLayout
from ray_etc.planners.regions import subtract


@dataclass(slots=True)
class _Held:
    """A box that is held, by whom, and whose turn it is to be asked."""

    box: Box
    ranks: list[int]
    turn: int = 0


@dataclass(frozen=True, slots=True)
class NaiveMove:
    """`box` of one tensor goes from rank `src` to rank `dst`; the same rank where it stays."""

    src: int
    dst: int
    key: tuple[str, str]
    box: Box
    nbytes: int


class NaivePlanner:
    """The index of what is held, and the moves of one new rank after the other."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], dict[Box, _Held]] = {}
        self._own: dict[int, dict[tuple[str, str], list[Box]]] = {}

    def add_source(self, rank: int, layout: RankLayout) -> None:
        """Take up what `rank` holds. Ranks are added in their order."""
        own = self._own.setdefault(rank, {})
        for shard in layout:
            if not shard.box.numel:
                continue
            key = shard.tensor.key
            boxes = self._held.setdefault(key, {})
            held = boxes.get(shard.box)
            if held is None:
                held = boxes[shard.box] = _Held(shard.box, [])
            if not held.ranks or held.ranks[-1] != rank:
                held.ranks.append(rank)
            own.setdefault(key, []).append(held.box)

    def moves_of(self, rank: int, layout: RankLayout) -> Iterator[NaiveMove]:
        """All that new rank `rank` needs, each element of each shard once. ValueError where nobody holds a part."""
        own = self._own.get(rank, {})
        for shard in layout:
            key, itemsize = shard.tensor.key, shard.tensor.itemsize
            missing = [shard.box] if shard.box.numel else []
            for box in own.get(key, ()):
                for part in _common(missing, box):
                    yield NaiveMove(rank, rank, key, part, part.numel * itemsize)
                    missing = subtract(missing, part)
            if not missing:
                continue
            for held in self._held.get(key, {}).values():
                for part in _common(missing, held.box):
                    src = held.ranks[held.turn % len(held.ranks)]
                    held.turn += 1
                    yield NaiveMove(src, rank, key, part, part.numel * itemsize)
                    missing = subtract(missing, part)
                if not missing:
                    break
            if missing:
                raise ValueError(f"nobody holds {missing[0]} of {key}, which rank {rank} needs")


def _common(region: list[Box], box: Box) -> list[Box]:
    """What `box` has of the disjoint boxes of `region`."""
    return [part for one in region if (part := one.intersect(box)) is not None]
