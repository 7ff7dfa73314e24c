"""Match what the next ranks need with what the present ones hold: the same work for all layers of one shape.

The result does not depend on where the new ranks are put: the assignment is chosen from it, and then the moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse import coo_array, csr_array

from ray_etc.planners.boxes import Box
from ray_etc.planners.errors import MissingPart, StateMissing
from ray_etc.planners.intersect import BoxArray, distinct, hash_of_sets, join, ranges
from ray_etc.planners.layout import TensorSpec
from ray_etc.planners.overlap import Overlap, Part
from ray_etc.planners.pieces import find_pieces
from ray_etc.planners.regions import disjoint, subtract
from ray_etc.planners.table import LayoutTable

WEIGHTS = ("param", "buffer")
"""Kinds of tensors that data-parallel replicas hold alike."""


WORTH_CASTING = 0.25
"""Weights are cast where their main weights cover this share of them, summed over ranks: they then move less, but no
longer as one stream to all replicas."""


@dataclass(frozen=True)
class Bundle:
    """Tensors that are alike on both sides: what moves of one of them, moves of all.

    They are all of `target_family`, a family of the target, and in the source of each of `source_families`: one, but
    for tied weights that different stages hold in different forms. `master_family`, of the target too, holds the
    tensors that these are derived from, where it is worth to cast them.
    """

    tensors: tuple[TensorSpec, ...]
    source_families: tuple[int, ...]
    target_family: int
    master_family: int | None = None

    @property
    def element_nbytes(self) -> int:
        return sum(tensor.itemsize for tensor in self.tensors)


@dataclass(frozen=True, eq=False)
class Match:
    """Every part of the wanted boxes, with those who want it and those who hold it.

    An atom is a part of one wanted box that lies in one piece, for all tensors of a bundle. Pieces are the distinct
    boxes that are held, made disjoint; the wanted boxes are the distinct ones of the target.

    Args:
        source, target: the tables; target ranks are the new ranks, wherever they will be put.
        bundles: every tensor of the target is in exactly one of those of its family.
        atoms: the boxes, grouped by bundle.
        atom_wanted, atom_piece: int64 [atoms], the number of the wanted box and of the piece.
        holder_piece, holder_row: int64 [holders], rows of `source` that hold a piece, in the order of pieces.
        wanted_row, wanted_first: rows of `target` in the order of the wanted box that they are, and where each
            wanted box begins among them.
    """

    source: LayoutTable
    target: LayoutTable
    bundles: tuple[Bundle, ...]
    atoms: BoxArray
    atom_wanted: np.ndarray
    atom_piece: np.ndarray
    holder_piece: np.ndarray
    holder_row: np.ndarray
    wanted_row: np.ndarray
    wanted_first: np.ndarray

    @cached_property
    def element_nbytes(self) -> np.ndarray:
        """Bytes of an element of all tensors of a bundle: int64 [bundles]."""
        return np.array([bundle.element_nbytes for bundle in self.bundles], dtype=np.int64)

    @cached_property
    def atom_nbytes(self) -> np.ndarray:
        """int64 [atoms]: all tensors of the bundle together, for one of those who want it."""
        return self.atoms.numel * self.element_nbytes[self.atoms.group]

    @property
    def nbytes_needed(self) -> int:
        """All that the new ranks need, in place or not."""
        return int(self.target.nbytes.sum())

    def overlap(self) -> Overlap:
        """Bytes that new ranks find with old ones: slot j of the overlap is rank j of the source.

        Weights are apart from the state of the optimizer, so that ZeRO-1, where each rank is a class of its own, does
        not make replicas of weights look different.
        """
        is_weight = np.array([bundle.tensors[0].kind in WEIGHTS for bundle in self.bundles], dtype=bool)
        of_weight = is_weight[self.atoms.group]
        return Overlap([self._part(of_weight), self._part(~of_weight)])

    def _part(self, among: np.ndarray) -> Part:
        """The part of `overlap` that the atoms of bool [atoms] `among` make."""
        wanted, wanted_at = np.unique(self.atom_wanted[among], return_inverse=True)
        owner, place = ranges(self.wanted_first[wanted], np.diff(self.wanted_first)[wanted])
        wants, class_of_new = _of_classes(
            owner, self.target.rank[self.wanted_row[place]], len(wanted), self.target.world_size
        )
        pieces, piece_at = np.unique(self.atom_piece[among], return_inverse=True)
        first = np.searchsorted(self.holder_piece, pieces)
        owner, place = ranges(first, np.searchsorted(self.holder_piece, pieces, side="right") - first)
        holds, class_of_old = _of_classes(
            owner, self.source.rank[self.holder_row[place]], len(pieces), self.source.world_size
        )
        shape = (len(wanted), len(pieces))
        nbytes = csr_array(coo_array((self.atom_nbytes[among], (wanted_at, piece_at)), shape=shape, dtype=np.int64))
        return Part(csr_array(wants.T @ nbytes @ holds), class_of_new, class_of_old)


def _of_classes(thing: np.ndarray, rank: np.ndarray, thing_count: int, world_size: int) -> tuple[csr_array, np.ndarray]:
    """How often a rank of each class has each thing (int64 [things, classes]), and the class of each rank.

    `rank[i]` has `thing[i]`; ranks of one class have the same things, equally often.
    """
    first, class_of_rank = distinct(hash_of_sets(rank, thing, world_size).view(np.int64))
    one_of_class = first[class_of_rank[rank]] == rank
    thing, owner = thing[one_of_class], class_of_rank[rank[one_of_class]]
    ones = np.ones(len(thing), dtype=np.int64)
    return csr_array(coo_array((ones, (thing, owner)), shape=(thing_count, len(first)))), class_of_rank


def match(source: LayoutTable, target: LayoutTable, *, all_of_it: bool = True) -> Match:
    """Find every part of `target` in `source`.

    Raises StateMissing where an element of the target is held nowhere in its shape and dtype, unless `all_of_it` is
    False: then only what is held is in the match.
    """
    ndim = max(source.offsets.shape[1], target.offsets.shape[1])
    source, target = source.padded(ndim), target.padded(ndim)
    bundles = _bundles(source, target)
    groups = {families: number for number, families in enumerate(dict.fromkeys(b.source_families for b in bundles))}
    pieces, holder_piece, holder_row = find_pieces(source, list(groups))
    first, wanted_of_row = distinct(target.family, target.offsets, target.lengths)
    held_at, held = _by_bundle(pieces, [groups[bundle.source_families] for bundle in bundles])
    wanted_at, wanted = _by_bundle(target.boxes[first], [bundle.target_family for bundle in bundles])
    a, b, atoms = join(wanted, held)
    found = np.zeros(len(wanted), dtype=np.int64)
    np.add.at(found, a, atoms.numel)
    if all_of_it and not np.array_equal(found, wanted.numel):
        raise StateMissing(_missing(np.flatnonzero(found != wanted.numel), wanted, a, atoms, bundles))
    order = np.argsort(wanted_of_row, kind="stable")
    return Match(
        source,
        target,
        bundles,
        atoms,
        wanted_at[a],
        held_at[b],
        holder_piece,
        holder_row,
        order,
        np.searchsorted(wanted_of_row[order], np.arange(len(first) + 1)),
    )


def _bundles(source: LayoutTable, target: LayoutTable) -> tuple[Bundle, ...]:
    """The tensors of each family of the target, divided by their families in the source."""
    held: dict[tuple[str, str], dict[int, TensorSpec]] = {}
    for family, tensors in enumerate(source.families):
        for tensor in tensors:
            held.setdefault(tensor.key, {})[family] = tensor
    master_of = _masters(target)
    grouped: dict[tuple[tuple[int, ...], int, int | None], list[TensorSpec]] = {}
    unlike: dict[tuple[str, str], MissingPart] = {}
    for family, tensors in enumerate(target.families):
        for tensor in tensors:
            families = held.get(tensor.key, {})
            for other in families.values():
                if _form(other) != _form(tensor):
                    box = Box.whole(tensor.shape)
                    reason = f"held as {other.dtype} {other.shape}, wanted as {tensor.dtype} {tensor.shape}"
                    unlike[tensor.key] = MissingPart(*tensor.key, box, box.numel * tensor.itemsize, reason)
            grouped.setdefault((tuple(families), family, master_of.get((family, tensor.key))), []).append(tensor)
    if unlike:
        raise StateMissing(unlike.values())
    return tuple(Bundle(tuple(tensors), *families) for families, tensors in grouped.items())


def _masters(target: LayoutTable) -> dict[tuple[int, tuple[str, str]], int]:
    """The family of the tensor that a tensor is derived from, by family and key, where enough ranks hold both.

    Under ZeRO-1 each replica has one range of the main weights only, and must get the others' weights by wire anyhow.
    """
    numel = np.bincount(target.family, target.lengths.prod(axis=1), len(target.families))
    families_of: dict[tuple[str, str], list[int]] = {}
    for family, tensors in enumerate(target.families):
        for tensor in tensors:
            families_of.setdefault(tensor.key, []).append(family)
    found = {}
    for family, tensors in enumerate(target.families):
        for tensor in tensors:
            masters = families_of.get((tensor.derived_from, tensor.name), []) if tensor.derived_from else []
            if len(masters) == 1 and numel[masters[0]] >= WORTH_CASTING * numel[family]:
                found[family, tensor.key] = masters[0]
    return found


def _form(tensor: TensorSpec) -> tuple[object, ...]:
    return (tensor.shape, tensor.dtype, tensor.itemsize)


def _by_bundle(boxes: BoxArray, group_of_bundle: list[int]) -> tuple[np.ndarray, BoxArray]:
    """The boxes of the group that each bundle looks at, grouped by bundle, and the number of each in `boxes`."""
    order = np.argsort(boxes.group, kind="stable")
    groups = np.array(group_of_bundle, dtype=np.int64)
    low = np.searchsorted(boxes.group[order], groups)
    bundle, place = ranges(low, np.searchsorted(boxes.group[order], groups, side="right") - low)
    number = order[place]
    return number, BoxArray(bundle, boxes.offsets[number], boxes.lengths[number])


def _missing(
    short: np.ndarray, wanted: BoxArray, atom_wanted: np.ndarray, atoms: BoxArray, bundles: tuple[Bundle, ...]
) -> Iterable[MissingPart]:
    """What nobody holds of the wanted boxes `short`, each element once, however many boxes it is in."""
    lost: dict[TensorSpec, list[Box]] = {}
    for number in short.tolist():
        tensors = bundles[wanted.group[number]].tensors
        ndim = len(tensors[0].shape)
        rest = [_box(wanted, number, ndim)]
        for atom in np.flatnonzero(atom_wanted == number).tolist():
            rest = subtract(rest, _box(atoms, atom, ndim))
        for tensor in tensors:
            lost.setdefault(tensor, []).extend(rest)
    for tensor, boxes in lost.items():
        for box in disjoint(boxes):
            yield MissingPart(*tensor.key, box, box.numel * tensor.itemsize, "held by no source")


def _box(boxes: BoxArray, number: int, ndim: int) -> Box:
    return Box(tuple(boxes.offsets[number, :ndim].tolist()), tuple(boxes.lengths[number, :ndim].tolist()))
