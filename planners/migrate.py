"""Make the plan: for every element of every target shard, one source to take it from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from scipy.optimize import linear_sum_assignment

from ray_etc.planners.boxes import Box
from ray_etc.planners.errors import MissingPart, StateMissing
from ray_etc.planners.layout import RankLayout, TensorSpec
from ray_etc.planners.overlap import overlap_nbytes
from ray_etc.planners.plan import MigrationPlan, Move
from ray_etc.planners.regions import cut, disjoint, join, subtract
from ray_etc.planners.rounds import split_rounds

PIECES_PER_SENDER = 16
"""Parts with several holders are cut no larger than this part of a sender's mean load, so that senders differ by
about 1/16 of it at most, while tensors that are small against the whole stay in one piece."""

Holder = tuple[int, int]
"""A source shard: (rank of the plan, position in its layout)."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """A part of a target shard that is not in its slot, with every source shard that holds all of it."""

    dst_rank: int
    dst_shard: int
    box: Box
    itemsize: int
    holders: tuple[Holder, ...]

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.itemsize


def make_plan(
    source: Mapping[int, RankLayout],
    target: Mapping[int, RankLayout],
    nodes: Mapping[int, str],
    *,
    staging_nbytes: int = 256 * 2**20,
    usable: Collection[int] | None = None,
) -> MigrationPlan:
    """Plan the moves that turn layout `source` into layout `target`.

    Keys are slots; a slot in only one of them joins or leaves. `nodes[slot]` is the node of each slot in either.
    `staging_nbytes` bounds what a rank sends, and what it receives, in one round. `usable` are the slots on which the
    new ranks could have been placed (all of them by default); only the lower bound depends on it.

    Each target element is taken once: from its own slot where that holds it, otherwise from the least loaded
    holder on its own node, otherwise from the least loaded holder anywhere. The same input gives the same plan.

    Raises StateMissing where no source holds an element of the target in the target's shape and dtype, and
    ValueError where a slot has no node or the budget is smaller than one element.
    """
    slots = tuple(sorted(source.keys() | target.keys()))
    homeless = [slot for slot in slots if slot not in nodes]
    if homeless:
        raise ValueError(f"no node is given for slots {homeless}")
    held = tuple(tuple(source.get(slot, ())) for slot in slots)
    wanted = tuple(tuple(target.get(slot, ())) for slot in slots)
    _refuse_mismatches(held, wanted)

    local: list[Move] = []
    fetches: list[Fetch] = []
    missing: list[tuple[TensorSpec, Box]] = []
    holders = _holders(held)
    own = [_holders((layout,)) for layout in held]
    for dst_rank, layout in enumerate(wanted):
        for dst_shard, shard in enumerate(layout):
            tensor = shard.tensor
            rest = [shard.box] if shard.box.numel else []
            for box, ((_, src_shard), *_) in own[dst_rank].get(tensor.key, {}).items():
                for part in filter(None, [piece.intersect(box) for piece in rest]):
                    move = Move(dst_rank, src_shard, dst_rank, dst_shard, part, part.numel * tensor.itemsize)
                    local.append(move)
                rest = subtract(rest, box)
            for part, part_holders in _by_holders(rest, holders.get(tensor.key, {})):
                if part_holders:
                    fetches.append(Fetch(dst_rank, dst_shard, part, tensor.itemsize, part_holders))
                else:
                    missing.append((tensor, part))
    if missing:
        raise StateMissing(_unique_parts(missing, "held by no source"))

    wire = _choose_senders(fetches, [nodes[slot] for slot in slots])
    return MigrationPlan(
        slots=slots,
        nodes=tuple(nodes[slot] for slot in slots),
        source=held,
        target=wanted,
        local=tuple(local),
        rounds=split_rounds(wire, staging_nbytes),
        nbytes_lower_bound=_lower_bound(
            dict(zip(slots, held, strict=True)),
            list(target.values()),
            [slot for slot in slots if usable is None or slot in usable],
        ),
        staging_nbytes=staging_nbytes,
    )


def _holders(layouts: Sequence[RankLayout]) -> dict[tuple[str, str], dict[Box, list[Holder]]]:
    """For each tensor, each distinct box that is held and where; replicas share one entry."""
    index: dict[tuple[str, str], dict[Box, list[Holder]]] = defaultdict(dict)
    for rank, layout in enumerate(layouts):
        for position, shard in enumerate(layout):
            if shard.box.numel:
                index[shard.tensor.key].setdefault(shard.box, []).append((rank, position))
    return index


def _by_holders(region: Iterable[Box], held: Mapping[Box, Sequence[Holder]]) -> list[tuple[Box, tuple[Holder, ...]]]:
    """Cut `region` into parts that have the same holders throughout."""
    parts: list[tuple[Box, tuple[Holder, ...]]] = [(box, ()) for box in region]
    for box, holders in held.items():
        refined = []
        for part, known in parts:
            common = part.intersect(box)
            if common is None:
                refined.append((part, known))
                continue
            refined.append((common, (*known, *holders)))
            refined.extend((rest, known) for rest in part.minus(common))
        parts = refined
    return parts


def _choose_senders(fetches: Sequence[Fetch], nodes: Sequence[str]) -> list[Move]:
    """Give each fetch to its least loaded holders, in bytes, those on the node of the destination first.

    Fetches with the least choice go first, then the largest: the small ones with many holders level out the rest.
    """
    choices: list[tuple[Fetch, dict[int, int]]] = []
    for fetch in fetches:
        near = [holder for holder in fetch.holders if nodes[holder[0]] == nodes[fetch.dst_rank]]
        # A slot may hold an element in several shards (tied copies): its first shard serves.
        choices.append((fetch, dict(reversed(near or fetch.holders))))
    choices.sort(key=lambda choice: (len(choice[1]), -choice[0].nbytes, choice[0].dst_rank, choice[0].dst_shard))

    senders = {rank for _, shard_of in choices for rank in shard_of}
    grain_nbytes = sum(fetch.nbytes for fetch in fetches) // max(1, len(senders)) // PIECES_PER_SENDER
    load = dict.fromkeys(senders, 0)
    moves: list[Move] = []
    for fetch, shard_of in choices:
        grain = fetch.box.numel if len(shard_of) == 1 else max(1, grain_nbytes // fetch.itemsize)
        pieces = cut(fetch.box, grain)
        turns = dict.fromkeys(sorted(shard_of), 0)
        for piece in pieces:
            sender = min(turns, key=lambda rank: (load[rank], rank))
            load[sender] += piece.numel * fetch.itemsize
            turns[sender] += 1
        # Each sender gets a run of neighbours, so that its part is one box wherever possible.
        first = 0
        for sender, count in turns.items():
            for box in join(pieces[first : first + count]):
                nbytes = box.numel * fetch.itemsize
                moves.append(Move(sender, shard_of[sender], fetch.dst_rank, fetch.dst_shard, box, nbytes))
            first += count
    return moves


def _refuse_mismatches(held: Sequence[RankLayout], wanted: Sequence[RankLayout]) -> None:
    """Raise StateMissing where a tensor has another shape or dtype in the source than in the target."""
    forms: dict[tuple[str, str], dict[tuple[object, ...], TensorSpec]] = defaultdict(dict)
    for layout in held:
        for shard in layout:
            forms[shard.tensor.key].setdefault(_form(shard.tensor), shard.tensor)
    missing: dict[tuple[str, str], MissingPart] = {}
    for layout in wanted:
        for shard in layout:
            tensor = shard.tensor
            if not shard.box.numel:
                continue
            for form, other in forms[tensor.key].items():
                if form != _form(tensor):
                    box = Box.whole(tensor.shape)
                    missing[tensor.key] = MissingPart(
                        *tensor.key,
                        box,
                        box.numel * tensor.itemsize,
                        f"held as {other.dtype} {other.shape}, wanted as {tensor.dtype} {tensor.shape}",
                    )
    if missing:
        raise StateMissing(missing.values())


def _form(tensor: TensorSpec) -> tuple[object, ...]:
    return (tensor.shape, tensor.dtype, tensor.itemsize)


def _unique_parts(missing: Iterable[tuple[TensorSpec, Box]], reason: str) -> list[MissingPart]:
    """The parts with each element named once, however many target ranks need it."""
    regions: dict[tuple[str, str], tuple[TensorSpec, list[Box]]] = {}
    for tensor, box in missing:
        regions.setdefault(tensor.key, (tensor, []))[1].append(box)
    return [
        MissingPart(*tensor.key, box, box.numel * tensor.itemsize, reason)
        for tensor, boxes in regions.values()
        for box in disjoint(boxes)
    ]


def _lower_bound(held: Mapping[int, RankLayout], wanted: Sequence[RankLayout], slots: Sequence[int]) -> int:
    """Target bytes that are not in place even under the best placement of the target ranks on `slots`."""
    overlap = overlap_nbytes(held, wanted, slots)
    ranks, columns = linear_sum_assignment(overlap, maximize=True)
    return sum(shard.nbytes for layout in wanted for shard in layout) - int(overlap[ranks, columns].sum())
