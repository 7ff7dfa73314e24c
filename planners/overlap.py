"""Overlap: how much of what each new rank needs each slot already holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse import csr_array


@dataclass(frozen=True)
class Part:
    """One kind of state, or several alike: what classes of new ranks find in classes of slots.

    `nbytes` is sparse int64 [classes wanted, classes held], `class_of_rank` int64 [ranks], and `class_of_slot` int64
    [slots], -1 where the slot holds nothing. Replicas are one class, so thousands of ranks may be few entries.
    """

    nbytes: csr_array
    class_of_rank: np.ndarray
    class_of_slot: np.ndarray

    @cached_property
    def _entries(self) -> tuple[np.ndarray, np.ndarray]:
        """The entries by a key that ascends, one past the last at the end so that every search ends on one."""
        entries = self.nbytes.tocoo()
        key = entries.coords[0].astype(np.int64) * self.nbytes.shape[1] + entries.coords[1]
        order = np.argsort(key)
        last = self.nbytes.shape[0] * self.nbytes.shape[1]
        return np.append(key[order], last), np.append(entries.data[order], 0)

    def at(self, wanted: np.ndarray, held: np.ndarray) -> np.ndarray:
        """The entries of classes `wanted` x `held` (arrays that broadcast; held -1: nothing), int64."""
        keys, data = self._entries
        wanted, held = np.broadcast_arrays(wanted, held)
        found = np.zeros(held.shape, dtype=np.int64)
        where = held >= 0
        key = wanted[where] * self.nbytes.shape[1] + held[where]
        place = np.searchsorted(keys, key)
        found[where] = np.where(keys[place] == key, data[place], 0)
        return found


class Overlap:
    """Bytes that each new rank finds on each slot: the sum of `parts`, kept by class and looked up in blocks."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """Raises ValueError where there is no part, or the parts do not have the same ranks and slots."""
        sizes = {(len(part.class_of_rank), len(part.class_of_slot)) for part in parts}
        if len(sizes) != 1:
            raise ValueError(f"parts have (ranks, slots) {sorted(sizes)}: give one part or more, all for the same ones")
        self.parts = tuple(parts)
        ((self.rank_count, self.slot_count),) = sizes

    @staticmethod
    def from_dense(nbytes: np.ndarray) -> Overlap:
        """Each rank and each slot a class of its own; `nbytes` is int64 [ranks, slots]."""
        if nbytes.ndim != 2:
            raise ValueError(f"overlap of shape {nbytes.shape} is not [ranks, slots]")
        ranks, slots = (np.arange(count) for count in nbytes.shape)
        return Overlap([Part(csr_array(np.asarray(nbytes, dtype=np.int64)), ranks, slots)])

    def blocks(self, ranks: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """int64 [n, a, b]: bytes of ranks [n, a] on slots [n, b]; a slot of -1 is none, and holds nothing."""
        total = np.zeros((*ranks.shape, slots.shape[1]), dtype=np.int64)
        for part in self.parts:
            held = np.where(slots < 0, -1, part.class_of_slot[slots])
            total += part.at(part.class_of_rank[ranks][:, :, None], held[:, None, :])
        return total

    def rows(self, ranks: np.ndarray) -> np.ndarray:
        """Bytes of some ranks on every slot: int64 [len(ranks), slots]."""
        return self.blocks(ranks[None], np.arange(self.slot_count)[None])[0]

    def on(self, slots: np.ndarray) -> Overlap:
        """The same ranks, with `slots` (bool mask or indices) as the only slots."""
        return Overlap([Part(p.nbytes, p.class_of_rank, p.class_of_slot[slots]) for p in self.parts])

    def without(self, slots: np.ndarray) -> Overlap:
        """As if `slots` (indices) held nothing."""
        parts = []
        for part in self.parts:
            class_of_slot = part.class_of_slot.copy()
            class_of_slot[slots] = -1
            parts.append(Part(part.nbytes, part.class_of_rank, class_of_slot))
        return Overlap(parts)

    def nbytes_unmoved(self) -> int:
        """Bytes that stay if rank i takes slot i, for as many as there are of both."""
        both = np.arange(min(self.rank_count, self.slot_count))[:, None]
        return int(self.blocks(both, both).sum())
