"""Demands: what stays in its slot, and what must come from another one, by classes of bytes that go the same ways."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ray_etc.planners.intersect import BoxArray, distinct, hash_of_sets, join, ranges
from ray_etc.planners.match import Match

CUTS_PER_ROUND = 16
"""Parts are unrolled until they can be cut in steps of at most this share of the staging budget."""


@dataclass(frozen=True, eq=False)
class Local:
    """Atoms that the slot of a new rank holds already: int64 [local] each, rows of the source and of the target."""

    atom: np.ndarray
    source_row: np.ndarray
    target_row: np.ndarray


@dataclass(frozen=True, eq=False)
class Casts:
    """Boxes that a new rank makes from what it derives them from: grouped by bundle, and rows of the target each."""

    boxes: BoxArray
    master_row: np.ndarray
    target_row: np.ndarray


@dataclass(frozen=True, eq=False)
class Streams:
    """Everything that comes over a wire, as one stream of bytes a class.

    Atoms of a class are held by the same ranks and wanted by the same others, so any bytes of a stream may go any
    way that others of it go. Ranks are those of the plan. A stream is a row of parts, each a box that is cut along
    `dim` only, in `units` (the rows along that dim) of `unit_nbytes`.

    Args:
        class_count: the number of classes.
        parts: the boxes, grouped by bundle, in the order of the streams.
        part_class, atom, dim, units, unit_nbytes: int64 [parts].
        holders_of, wanters_of: (first, ranks) of each class: ranks[first[c] : first[c + 1]], rising.
        holder_row, wanter_row: (first, rows): rows[first[p] + i] is the row of part p for the i-th rank of its class.
    """

    class_count: int
    parts: BoxArray
    part_class: np.ndarray
    atom: np.ndarray
    dim: np.ndarray
    units: np.ndarray
    unit_nbytes: np.ndarray
    holders_of: tuple[np.ndarray, np.ndarray]
    wanters_of: tuple[np.ndarray, np.ndarray]
    holder_row: tuple[np.ndarray, np.ndarray]
    wanter_row: tuple[np.ndarray, np.ndarray]

    @cached_property
    def part_start(self) -> np.ndarray:
        """Where each part begins, all streams end to end, in bytes: int64 [parts + 1]."""
        return np.concatenate([[0], np.cumsum(self.units * self.unit_nbytes)])

    @cached_property
    def unit_start(self) -> np.ndarray:
        """The same in units: int64 [parts + 1]."""
        return np.concatenate([[0], np.cumsum(self.units)])

    @cached_property
    def class_start(self) -> np.ndarray:
        """Where each stream begins, in bytes: int64 [classes + 1]."""
        return self.part_start[np.searchsorted(self.part_class, np.arange(self.class_count + 1))]

    @property
    def nbytes(self) -> np.ndarray:
        """Bytes of each stream, counted once: int64 [classes]."""
        return np.diff(self.class_start)

    def unit_at(self, nbytes: np.ndarray) -> np.ndarray:
        """The unit that begins nearest to a position in bytes, all streams end to end: int64."""
        part = np.clip(np.searchsorted(self.part_start, nbytes, side="right") - 1, 0, len(self.units) - 1)
        # Halves always up, so that chunks of less than a unit never get two.
        inside = np.floor((nbytes - self.part_start[part]) / self.unit_nbytes[part] + 0.5).astype(np.int64)
        return self.unit_start[part] + np.minimum(inside, self.units[part])

    def nbytes_at(self, unit: np.ndarray) -> np.ndarray:
        """Where a unit begins, in bytes: int64."""
        part = np.clip(np.searchsorted(self.unit_start, unit, side="right") - 1, 0, len(self.units) - 1)
        return self.part_start[part] + (unit - self.unit_start[part]) * self.unit_nbytes[part]


def find_demands(
    found: Match, plan_rank: np.ndarray, world_size: int, staging_nbytes: int
) -> tuple[Local, Casts, Streams]:
    """Divide the atoms of `found` into those that stay, those that are cast from others, and those that move.

    New rank i is rank `plan_rank[i]` of the `world_size` ranks of the plan; the source's ranks are the plan's.
    Raises ValueError where the staging budget is less than two elements of all tensors that are alike.
    """
    owner, place = ranges(found.wanted_first[found.atom_wanted], np.diff(found.wanted_first)[found.atom_wanted])
    row = found.wanted_row[place]
    rank = plan_rank[found.target.rank[row]]
    holder_key = found.holder_piece * world_size + found.source.rank[found.holder_row]
    key = found.atom_piece[owner] * world_size + rank
    at = np.minimum(np.searchsorted(holder_key, key), len(holder_key) - 1)
    stays = holder_key[at] == key if len(holder_key) else np.zeros(0, dtype=bool)
    local = Local(owner[stays], found.holder_row[at[stays]], row[stays])
    owner, row, rank = owner[~stays], row[~stays], rank[~stays]
    casts, is_cast = _casts(found, owner, row)
    owner, row, rank = owner[~is_cast], row[~is_cast], rank[~is_cast]
    return local, casts, _streams(found, owner, row, rank, staging_nbytes)


def _casts(found: Match, atom: np.ndarray, row: np.ndarray) -> tuple[Casts, np.ndarray]:
    """What can be cast of the demands "row `row[i]` of the target wants atom `atom[i]`", and which these are.

    A demand is cast where the main weights that its own rank will have cover all of it.
    """
    target = found.target
    master_of = np.array([-1 if b.master_family is None else b.master_family for b in found.bundles], dtype=np.int64)
    some = np.flatnonzero(master_of[found.atoms.group[atom]] >= 0)
    boxes = found.atoms[atom[some]]
    masters = np.flatnonzero(np.isin(target.family, master_of))
    # One of two equal rows will do: a rank may hold a tied weight twice.
    columns = (target.family, target.rank, target.offsets, target.lengths)
    masters = masters[np.sort(distinct(*(column[masters] for column in columns))[0])]
    group = target.rank[row[some]] * len(target.families) + master_of[boxes.group]
    held = BoxArray(
        target.rank[masters] * len(target.families) + target.family[masters],
        target.offsets[masters],
        target.lengths[masters],
    )
    demand, master, common = join(BoxArray(group, boxes.offsets, boxes.lengths), held)
    covered = np.zeros(len(some), dtype=np.int64)
    np.add.at(covered, demand, common.numel)
    whole = covered == boxes.numel
    is_cast = np.zeros(len(atom), dtype=bool)
    is_cast[some[whole]] = True
    taken = whole[demand]
    made = BoxArray(boxes.group[demand[taken]], common.offsets[taken], common.lengths[taken])
    return Casts(made, masters[master[taken]], row[some[demand[taken]]]), is_cast


def _streams(found: Match, atom: np.ndarray, row: np.ndarray, rank: np.ndarray, staging_nbytes: int) -> Streams:
    """Streams of the demands "row `row[i]` of the target, on rank `rank[i]`, wants atom `atom[i]`"."""
    order = np.lexsort((rank, atom))
    atom, row, rank = atom[order], row[order], rank[order]
    # A rank that wants an atom in two places (a tied weight) is in two groups, so that a group has it once.
    again = np.zeros(len(atom), dtype=np.int64)
    repeats = np.flatnonzero((atom[1:] == atom[:-1]) & (rank[1:] == rank[:-1])) + 1
    for index in repeats.tolist():
        again[index] = again[index - 1] + 1
    first, group = distinct(atom, again)
    members = np.lexsort((rank, group))
    edges = np.searchsorted(group[members], np.arange(len(first) + 1))
    group_atom = atom[first]
    piece = found.atom_piece[group_atom]

    piece_count = int(found.holder_piece.max(initial=-1)) + 1
    held_by = hash_of_sets(found.holder_piece, found.source.rank[found.holder_row], piece_count)
    wanted_by = hash_of_sets(group, rank, len(first))
    first_group, class_of_group = distinct(held_by[piece].view(np.int64), wanted_by.view(np.int64))
    piece_edges = np.searchsorted(found.holder_piece, np.arange(piece_count + 1))

    atoms = found.atoms[group_atom]
    order = np.lexsort((*atoms.offsets.T[::-1], atoms.group, class_of_group))
    boxes = atoms[order]
    of_part, parts, dim = _cut_fine(boxes, found.element_nbytes, staging_nbytes)
    group_of_part = order[of_part]
    units = np.take_along_axis(parts.lengths, dim[:, None], axis=1)[:, 0]
    unit_nbytes = parts.numel * found.element_nbytes[parts.group] // np.maximum(units, 1)
    one_piece = piece[first_group]
    return Streams(
        class_count=len(first_group),
        parts=parts,
        part_class=class_of_group[group_of_part],
        atom=group_atom[group_of_part],
        dim=dim,
        units=units,
        unit_nbytes=unit_nbytes,
        holders_of=_lists(piece_edges[one_piece], np.diff(piece_edges)[one_piece], found.source.rank[found.holder_row]),
        wanters_of=_lists(edges[first_group], np.diff(edges)[first_group], rank[members]),
        holder_row=(piece_edges[piece[group_of_part]], found.holder_row),
        wanter_row=(edges[group_of_part], row[members]),
    )


def _lists(start: np.ndarray, count: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """values[start[i] : start[i] + count[i]] for each i, end to end, and where each begins."""
    _, place = ranges(start, count)
    return np.concatenate([[0], np.cumsum(count)]), values[place]


def _cut_fine(
    boxes: BoxArray, element_nbytes: np.ndarray, staging_nbytes: int
) -> tuple[np.ndarray, BoxArray, np.ndarray]:
    """Boxes that can be cut finely along one dim: the box that each is part of, the parts, and the dim of each.

    A box is cut along its first dim longer than 1. Where one row along that dim is too much for a fine cut, each row
    becomes a part of its own, and is cut along the next dim.
    """
    largest = int(element_nbytes[boxes.group].max(initial=0))
    if 2 * largest > staging_nbytes:
        raise ValueError(
            f"staging_nbytes={staging_nbytes} is less than two elements of tensors that move together, {2 * largest} "
            f"bytes; use that or more"
        )
    grain = max(staging_nbytes // CUTS_PER_ROUND, largest)
    of_part = np.arange(len(boxes))
    while True:
        dim = (boxes.lengths > 1).argmax(axis=1)
        units = np.take_along_axis(boxes.lengths, dim[:, None], axis=1)[:, 0]
        row_nbytes = boxes.numel * element_nbytes[boxes.group] // np.maximum(units, 1)
        coarse = (row_nbytes > grain) & ((boxes.lengths > 1).sum(axis=1) > 1)
        if not coarse.any():
            return of_part, boxes, dim
        owner, step = ranges(np.zeros(len(boxes), dtype=np.int64), np.where(coarse, units, 1))
        offsets, lengths = boxes.offsets[owner].copy(), boxes.lengths[owner].copy()
        rows = np.arange(len(owner))
        offsets[rows, dim[owner]] += step
        lengths[rows, dim[owner]] = np.where(coarse[owner], 1, lengths[rows, dim[owner]])
        boxes = BoxArray(boxes.group[owner], offsets, lengths)
        of_part = of_part[owner]
