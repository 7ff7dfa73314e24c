"""A generation's layout as arrays: what thousands of ranks hold, without an object a shard.

Layers of one shape share their geometry, and so do a weight's moments: tensors that the same ranks hold in the same
boxes are one family, and a row stands for a box of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ray_etc.planners.boxes import Box
from ray_etc.planners.intersect import BoxArray, ragged
from ray_etc.planners.layout import RankLayout, Shard, TensorSpec


@dataclass(frozen=True, eq=False)
class LayoutTable:
    """Every shard of `world_size` ranks; row i says that `rank[i]` holds a box of each tensor of family `family[i]`.

    Tensors of a family have one shape. `family` and `rank` are int64 [rows], `offsets` and `lengths` int64
    [rows, ndim] in elements of the logical tensor, where dims that a tensor does not have are offset 0, length 1.
    Two rows may be equal: a rank that holds a tied weight twice. Empty boxes are not listed.

    `reported` are the lists that the ranks gave, where they did, and `position` (int64, one number a row and tensor,
    row by row) is where each shard is in its list; without them a rank's shards are in the order of its rows.

    As a sequence it is the `RankLayout` of each rank.
    """

    world_size: int
    families: tuple[tuple[TensorSpec, ...], ...]
    family: np.ndarray
    rank: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    position: np.ndarray | None = None
    reported: tuple[RankLayout, ...] | None = None

    @classmethod
    def of(cls, layouts: Sequence[RankLayout]) -> LayoutTable:
        """The table of layouts as ranks report them."""
        shapes: dict[tuple[str, str], TensorSpec] = {}
        held: dict[tuple[str, str], list[tuple[int, Box]]] = {}
        positions: dict[tuple[str, str], list[int]] = {}
        for rank, layout in enumerate(layouts):
            for position, shard in enumerate(layout):
                key = shard.tensor.key
                if shard.box.numel:
                    shapes.setdefault(key, shard.tensor)
                    held.setdefault(key, []).append((rank, shard.box))
                    positions.setdefault(key, []).append(position)
        alike: dict[tuple[object, ...], list[tuple[str, str]]] = {}
        for key, where in held.items():
            alike.setdefault((shapes[key].shape, tuple(where)), []).append(key)
        families = tuple(tuple(shapes[key] for key in keys) for keys in alike.values())
        ndim = max((len(tensor.shape) for tensor in shapes.values()), default=1) or 1
        rows: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = [
            (number, rank, (*box.offsets, *(0,) * ndim)[:ndim], (*box.lengths, *(1,) * ndim)[:ndim])
            for number, keys in enumerate(alike.values())
            for rank, box in held[keys[0]]
        ]
        flat = [
            where
            for keys in alike.values()
            for places in zip(*(positions[key] for key in keys), strict=True)
            for where in places
        ]
        return cls(
            len(layouts),
            families,
            np.array([row[0] for row in rows], dtype=np.int64),
            np.array([row[1] for row in rows], dtype=np.int64),
            np.array([row[2] for row in rows], dtype=np.int64).reshape(-1, ndim),
            np.array([row[3] for row in rows], dtype=np.int64).reshape(-1, ndim),
            np.array(flat, dtype=np.int64),
            tuple(tuple(layout) for layout in layouts),
        )

    def padded(self, ndim: int) -> LayoutTable:
        """The same table with at least `ndim` dims."""
        more = max(0, ndim - self.offsets.shape[1])
        offsets = np.pad(self.offsets, ((0, 0), (0, more)))
        return replace(self, offsets=offsets, lengths=np.pad(self.lengths, ((0, 0), (0, more)), constant_values=1))

    def on(self, rank_of: np.ndarray, world_size: int) -> LayoutTable:
        """The same shards where rank i of this table is `rank_of[i]` of `world_size`; the others hold nothing."""
        reported = None
        if self.reported is not None:
            lists: list[RankLayout] = [()] * world_size
            for rank, layout in zip(rank_of.tolist(), self.reported, strict=True):
                lists[rank] = layout
            reported = tuple(lists)
        return replace(self, world_size=world_size, rank=rank_of[self.rank], reported=reported)

    @property
    def boxes(self) -> BoxArray:
        """The box of each row, grouped by family."""
        return BoxArray(self.family, self.offsets, self.lengths)

    @cached_property
    def family_sizes(self) -> np.ndarray:
        """Tensors of each family: int64 [families]."""
        return np.array([len(tensors) for tensors in self.families], dtype=np.int64)

    @cached_property
    def element_nbytes(self) -> np.ndarray:
        """Bytes of one element of all tensors of a family: int64 [families]."""
        return np.array([sum(tensor.itemsize for tensor in tensors) for tensors in self.families], dtype=np.int64)

    @property
    def nbytes(self) -> np.ndarray:
        """Bytes of each row, all tensors of its family together: int64 [rows]."""
        return self.lengths.prod(axis=1) * self.element_nbytes[self.family]

    def nbytes_by_kind(self) -> dict[str, np.ndarray]:
        """What each rank holds of each kind of tensor: int64 [world_size] a kind."""
        numel = self.lengths.prod(axis=1)
        found: dict[str, np.ndarray] = {}
        kinds = {tensor.kind for tensors in self.families for tensor in tensors}
        for kind in sorted(kinds):
            itemsize = np.array([sum(t.itemsize for t in tensors if t.kind == kind) for tensors in self.families])
            total = np.zeros(self.world_size, dtype=np.int64)
            np.add.at(total, self.rank, numel * itemsize[self.family])
            found[kind] = total
        return found

    def largest_by_kind(self) -> dict[str, np.ndarray]:
        """The most that each rank holds of any one tensor of a kind: int64 [world_size] a kind."""
        cell, where = np.unique(self.rank * len(self.families) + self.family, return_inverse=True)
        numel = np.zeros(len(cell), dtype=np.int64)
        np.add.at(numel, where, self.lengths.prod(axis=1))
        rank, family = np.divmod(cell, max(len(self.families), 1))
        found: dict[str, np.ndarray] = {}
        for kind in sorted({tensor.kind for tensors in self.families for tensor in tensors}):
            itemsize = np.array(
                [max([t.itemsize for t in tensors if t.kind == kind] or [0]) for tensors in self.families]
            )
            found[kind] = np.zeros(self.world_size, dtype=np.int64)
            np.maximum.at(found[kind], rank, numel * itemsize[family])
        return found

    @cached_property
    def positions(self) -> tuple[np.ndarray, np.ndarray]:
        """Where shards are in the list of their rank: that of tensor k of row i is `places[starts[i] + k]`."""
        sizes = self.family_sizes[self.family]
        if self.position is not None:
            return np.cumsum(sizes) - sizes, self.position
        order = np.argsort(self.rank, kind="stable")
        before = np.cumsum(sizes[order]) - sizes[order]
        first_of_rank = np.zeros(self.world_size, dtype=np.int64)
        ranks, first = np.unique(self.rank[order], return_index=True)
        first_of_rank[ranks] = before[first]
        base = np.empty_like(before)
        base[order] = before - first_of_rank[self.rank[order]]
        owner, place = ragged(sizes)
        return np.cumsum(sizes) - sizes, base[owner] + place

    def shard_position(self, row: int, key: tuple[str, str]) -> int:
        """Where the shard of one tensor of a row is in the list of its rank."""
        starts, places = self.positions
        return int(places[starts[row] + self._place_in_family[int(self.family[row])][key]])

    @cached_property
    def _place_in_family(self) -> list[dict[tuple[str, str], int]]:
        return [{tensor.key: place for place, tensor in enumerate(tensors)} for tensors in self.families]

    @cached_property
    def _rows_by_rank(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(self.rank, kind="stable")
        return order, np.searchsorted(self.rank[order], np.arange(self.world_size + 1))

    def __len__(self) -> int:
        return self.world_size

    def __iter__(self) -> Iterator[RankLayout]:
        return (self[rank] for rank in range(self.world_size))

    def __getitem__(self, rank: int) -> RankLayout:
        """The shards of one rank, in their order."""
        if self.reported is not None:
            return self.reported[rank]
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} of {self.world_size}")
        order, edges = self._rows_by_rank
        starts, places = self.positions
        shards: list[tuple[int, Shard]] = []
        for row in order[edges[rank] : edges[rank + 1]].tolist():
            for number, tensor in enumerate(self.families[self.family[row]]):
                shards.append((int(places[starts[row] + number]), Shard(tensor, self.box(row, len(tensor.shape)))))
        shards.sort(key=lambda pair: pair[0])
        return tuple(shard for _, shard in shards)

    def box(self, row: int, ndim: int) -> Box:
        """The box of a row, for a tensor of `ndim` dims."""
        return Box(tuple(self.offsets[row, :ndim].tolist()), tuple(self.lengths[row, :ndim].tolist()))
