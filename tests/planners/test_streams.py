"""Whose streams a new rank is given, against the rule in words."""

from __future__ import annotations

from itertools import product

import pytest

from ray_etc.planners.parallel import Coordinate, ParallelConfig, sources_of_streams

SMALL = [ParallelConfig(*axes) for axes in product((1, 2, 4), (1, 2), (1, 2, 3))]


def coordinates(parallel: ParallelConfig) -> list[Coordinate]:
    return [parallel.coordinate(rank) for rank in range(parallel.world_size)]


@pytest.mark.parametrize("old", SMALL, ids=str)
@pytest.mark.parametrize("new", SMALL, ids=str)
def test_sources_of_streams(old: ParallelConfig, new: ParallelConfig) -> None:
    held = coordinates(old)
    for wanted in coordinates(new):
        sources = sources_of_streams(held, wanted)
        data = wanted.data if wanted.data < old.data_parallel else 0
        if wanted.pipeline >= old.pipeline_parallel:
            assert sources == set()
        elif wanted.tensor < old.tensor_parallel:
            assert sources == {Coordinate(wanted.tensor, data, wanted.pipeline, wanted.tensor)}
        else:
            assert sources == {Coordinate(0, data, wanted.pipeline)}


def test_survivors_of_a_death_may_lack_any_rank() -> None:
    held = [Coordinate(1, 0, 0, 1), Coordinate(0, 1, 0, 0)]  # of TP2 DP2
    assert sources_of_streams(held, Coordinate(0, 0, 0, 0)) == set(held)
    assert sources_of_streams(held, Coordinate(1, 0, 0, 1)) == {held[0]}


def test_experts_go_by_their_own_mesh() -> None:
    old, new = ParallelConfig(data_parallel=4, expert_parallel=4), ParallelConfig(data_parallel=2, expert_parallel=2)
    held = coordinates(old)
    for wanted in coordinates(new):
        assert sources_of_streams(held, wanted) == {held[wanted.data]}
    # TP2 EP2 with whole experts to TP2 DP2 EP2 with halves of them: the place among the experts of rank 2 was rank 0's.
    old = ParallelConfig(2, 1, 1, expert_parallel=2, expert_tensor_parallel=1)
    new = ParallelConfig(2, 1, 2, expert_parallel=2)
    held, wanted = coordinates(old), coordinates(new)[2]
    assert wanted == Coordinate(0, 1, 0, expert_tensor=0, expert=1)
    assert sources_of_streams(held, wanted) == {held[0], held[1]}
