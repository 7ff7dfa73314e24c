"""Rounds: the wire moves in batches that bound the staging memory of every rank.

In a round every rank posts all of its sends and receives at once, so no order of ranks can deadlock. All pieces from
one rank to another in one round travel as one packed message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from ray_etc.planners.plan import Move
from ray_etc.planners.regions import cut, merge

PIECES_PER_ROUND = 8
"""A move is cut no larger than this part of the budget, so that a round is filled to at least 7/8 before a pair
goes on to the next. Pieces that land in the same round are joined again, so the cuts cost nothing there."""


def split_rounds(moves: Iterable[Move], staging_nbytes: int) -> tuple[tuple[Move, ...], ...]:
    """Spread wire `moves` over rounds in which no rank sends, nor receives, more than `staging_nbytes` bytes.

    Pairs of ranks with most bytes go first, pairs of equal size in the order of a ring, so that in an even
    exchange each rank sends to one peer and receives from one other and messages stay large. Each pair fills the
    earliest rounds where both ends have room. At most about twice the fewest possible rounds: a full round is
    full at one end of the pair.

    Raises ValueError where the budget is smaller than one element.
    """
    pairs: dict[tuple[int, int], list[Move]] = defaultdict(list)
    for move in moves:
        pairs[move.src_rank, move.dst_rank].append(move)
    rank_count = 1 + max((max(pair) for pair in pairs), default=0)
    nbytes = {pair: sum(move.nbytes for move in part) for pair, part in pairs.items()}

    def order(pair: tuple[int, int]) -> tuple[int, int, int]:
        src, dst = pair
        return (-nbytes[pair], (dst - src) % rank_count, src)

    sent: dict[tuple[int, int], int] = defaultdict(int)
    received: dict[tuple[int, int], int] = defaultdict(int)
    rounds: list[list[Move]] = []
    for src, dst in sorted(pairs, key=order):
        index = 0
        for piece in _pieces(pairs[src, dst], staging_nbytes):
            while max(sent[src, index], received[dst, index]) + piece.nbytes > staging_nbytes:
                index += 1
            sent[src, index] += piece.nbytes
            received[dst, index] += piece.nbytes
            # The index passes only rounds that are in use, so it is never more than one past the last.
            if index == len(rounds):
                rounds.append([])
            _append(rounds[index], piece)
    return tuple(tuple(sorted(part, key=lambda move: (move.src_rank, move.dst_rank))) for part in rounds)


def _pieces(moves: Iterable[Move], staging_nbytes: int) -> Iterable[Move]:
    """The moves of one pair in the order of the target, cut into pieces that fill rounds well."""
    for move in sorted(moves, key=lambda move: (move.dst_shard, move.box, move.src_shard)):
        itemsize = move.nbytes // move.box.numel
        if itemsize > staging_nbytes:
            raise ValueError(f"staging_nbytes={staging_nbytes} is less than one element; use {itemsize} bytes or more")
        for box in cut(move.box, max(1, staging_nbytes // PIECES_PER_ROUND // itemsize)):
            yield replace(move, box=box, nbytes=box.numel * itemsize)


def _append(moves: list[Move], piece: Move) -> None:
    """Add `piece`, joined with the pieces before it of the same move."""
    while moves and replace(moves[-1], box=piece.box, nbytes=piece.nbytes) == piece:
        joined = merge(moves[-1].box, piece.box)
        if joined is None:
            break
        piece = replace(piece, box=joined, nbytes=moves.pop().nbytes + piece.nbytes)
    moves.append(piece)
