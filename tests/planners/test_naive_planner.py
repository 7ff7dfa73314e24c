"""The plan that benchmarks compare with is a right one, and moves what rank i on slot i must."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from small_models import config, layouts_on, logical_arrays, overlap_nbytes, small_model

from benchmarks.naive_planner import NaivePlanner
from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import RankLayout, Shard, TensorSpec
from ray_etc.planners.parallel import ParallelConfig

TRANSITIONS = [
    (config(2, 1, 2), config(1, 2, 2)),
    (config(2, 2, 2, zero=True), config(2, 1, 3, zero=True)),
    (config(1, 2, 3, zero=True), config(4, 1, 1)),
    (ParallelConfig(2, 2, 2, fully_sharded=True), config(1, 1, 5, zero=True)),
]


@pytest.mark.parametrize(("old", "new"), TRANSITIONS, ids=str)
def test_every_element_arrives_once_and_no_byte_more_travels(old: ParallelConfig, new: ParallelConfig) -> None:
    held = layouts_on(range(old.world_size), old, small_model())
    wanted = layouts_on(range(new.world_size), new, small_model())
    logical = logical_arrays([*held.values(), *wanted.values()])
    planner = NaivePlanner()
    for rank, layout in held.items():
        planner.add_source(rank, layout)
    wire = 0
    for rank, layout in wanted.items():
        got: dict[tuple[str, str], list[int]] = defaultdict(list)
        for move in planner.moves_of(rank, layout):
            assert any(s.tensor.key == move.key and s.box.intersect(move.box) == move.box for s in held[move.src])
            assert move.dst == rank
            got[move.key] += ids_of(logical[move.key], move.box)
            wire += move.nbytes * (move.src != rank)
        expected: dict[tuple[str, str], list[int]] = defaultdict(list)
        for shard in layout:
            if shard.box.numel:
                expected[shard.tensor.key] += ids_of(logical[shard.tensor.key], shard.box)
        assert {key: sorted(ids) for key, ids in got.items()} == {key: sorted(ids) for key, ids in expected.items()}

    ranks = range(max(old.world_size, new.world_size))
    overlap = overlap_nbytes(held, list(wanted.values()), ranks)
    in_place = sum(int(overlap[rank, rank]) for rank in wanted)
    assert wire == sum(shard.nbytes for layout in wanted.values() for shard in layout) - in_place


def test_replicas_take_turns() -> None:
    tensor = TensorSpec("param", "w", (4,), "bfloat16", 2)
    whole: RankLayout = (Shard(tensor, Box((0,), (4,))),)
    planner = NaivePlanner()
    for rank in range(3):
        planner.add_source(rank, whole)
    assert [move.src for rank in range(3, 9) for move in planner.moves_of(rank, whole)] == [0, 1, 2, 0, 1, 2]


def test_what_nobody_holds_is_refused() -> None:
    tensor = TensorSpec("param", "w", (4,), "bfloat16", 2)
    planner = NaivePlanner()
    planner.add_source(0, (Shard(tensor, Box((0,), (2,))),))
    with pytest.raises(ValueError, match="nobody holds"):
        list(planner.moves_of(1, (Shard(tensor, Box((0,), (4,))),)))


def ids_of(array: np.ndarray, box: Box) -> list[int]:
    return array[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))].ravel().tolist()
