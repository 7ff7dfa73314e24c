"""Rounds hold their budget, lose nothing and are few."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_etc.planners.boxes import Box
from ray_etc.planners.plan import Move
from ray_etc.planners.rounds import split_rounds

ITEMSIZE = 4


def move(src: int, dst: int, rows: int, columns: int = 3, shard: int = 0) -> Move:
    return Move(src, shard, dst, shard, Box((0, 0), (rows, columns)), rows * columns * ITEMSIZE)


MOVES = st.lists(
    st.builds(move, st.integers(0, 4), st.integers(5, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 3)),
    max_size=12,
    unique_by=lambda m: (m.src_rank, m.dst_rank, m.src_shard),
)


def cells(moves: list[Move]) -> Counter[tuple[int, ...]]:
    """Every element of every move, by source, destination, shard and place."""
    return Counter(
        (m.src_rank, m.dst_rank, m.src_shard, m.dst_shard, row, column)
        for m in moves
        for row in range(m.box.offsets[0], m.box.offsets[0] + m.box.lengths[0])
        for column in range(m.box.offsets[1], m.box.offsets[1] + m.box.lengths[1])
    )


def busiest(moves: list[Move]) -> int:
    nbytes: Counter[tuple[str, int]] = Counter()
    for m in moves:
        nbytes["sends", m.src_rank] += m.nbytes
        nbytes["receives", m.dst_rank] += m.nbytes
    return max(nbytes.values(), default=0)


@given(MOVES, st.integers(ITEMSIZE, 500))
def test_rounds_keep_every_element_and_the_budget(moves: list[Move], staging_nbytes: int) -> None:
    rounds = split_rounds(moves, staging_nbytes)
    assert cells([m for part in rounds for m in part]) == cells(moves)
    for part in rounds:
        assert part
        assert 0 < busiest(list(part)) <= staging_nbytes
        assert all(m.nbytes == m.box.numel * ITEMSIZE for m in part)
        assert list(part) == sorted(part, key=lambda m: (m.src_rank, m.dst_rank))
    assert rounds == split_rounds(moves[::-1], staging_nbytes)


@given(MOVES, st.integers(320, 2000))
def test_rounds_are_few(moves: list[Move], staging_nbytes: int) -> None:
    """A round that a pair passes by is full to 7/8 at one end, so no more than about twice the fewest."""
    fewest = -(-busiest(moves) // staging_nbytes)
    assert len(split_rounds(moves, staging_nbytes)) <= 1 + 2 * fewest * 8 / 7


def test_one_round_where_all_fits() -> None:
    moves = [move(src, dst, 2) for src in range(4) for dst in range(4) if src != dst]
    (only,) = split_rounds(moves, 10**6)
    assert len(only) == len(moves)


def test_even_exchange_goes_round_the_ring_in_large_messages() -> None:
    """Four ranks, each pair one budget: three rounds, each rank one whole message to one peer."""
    moves = [move(src, dst, 64, 4) for src in range(4) for dst in range(4) if src != dst]
    rounds = split_rounds(moves, 64 * 4 * ITEMSIZE)
    assert [len(part) for part in rounds] == [4, 4, 4]
    assert {m.box for part in rounds for m in part} == {Box((0, 0), (64, 4))}


def test_a_row_larger_than_the_budget_is_cut() -> None:
    rounds = split_rounds([move(0, 1, 2, 9)], ITEMSIZE)
    assert len(rounds) == 18


def test_budget_below_one_element_is_refused() -> None:
    with pytest.raises(ValueError, match="staging_nbytes=3 is less than one element"):
        split_rounds([move(0, 1, 1)], 3)
