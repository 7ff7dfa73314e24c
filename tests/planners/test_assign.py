"""Assignment against all permutations, and overlap against numbered elements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import config, layouts_on, logical_arrays, small_model

from ray_etc.planners.assign import Assignment, assign, overlap_nbytes
from ray_etc.planners.boxes import Box
from ray_etc.planners.expected import expected_layouts
from ray_etc.planners.layout import Shard, TensorSpec
from ray_etc.planners.matching import best_matching


def best_of_all(
    overlap: np.ndarray, slots: Sequence[int], nodes: dict[int, str], groups: Sequence[Sequence[int]]
) -> tuple[int, tuple[int, ...]] | None:
    """Most bytes, then first in order, of all placements with whole groups; None where there is none."""
    column = {slot: index for index, slot in enumerate(slots)}
    best: tuple[int, tuple[int, ...]] | None = None
    for placed in permutations(sorted(slots), len(overlap)):
        if any(len({nodes[placed[rank]] for rank in group}) > 1 for group in groups):
            continue
        kept = int(sum(overlap[rank, column[slot]] for rank, slot in enumerate(placed)))
        if best is None or kept > best[0]:
            best = (kept, placed)
    return best


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, list[int], dict[int, str], list[list[int]]]:
    slot_count = draw(st.integers(1, 6))
    rank_count = draw(st.integers(1, slot_count))
    slots = draw(st.permutations(range(0, 3 * slot_count, 3)))
    nodes = {slot: draw(st.sampled_from("abc")) for slot in slots}
    values = st.integers(0, 3) | st.integers(0, 2**40)
    rows = draw(st.lists(st.lists(values, min_size=slot_count, max_size=slot_count), min_size=rank_count, max_size=6))
    size = draw(st.integers(1, 3))
    groups = [list(range(first, first + size)) for first in range(0, rank_count - size + 1, size)]
    return np.array(rows[:rank_count], dtype=np.int64), list(slots), nodes, groups


@settings(deadline=None, max_examples=300)
@given(problems())
def test_equals_the_best_of_all_permutations(
    problem: tuple[np.ndarray, list[int], dict[int, str], list[list[int]]],
) -> None:
    overlap, slots, nodes, groups = problem
    found = assign(overlap, slots, nodes, groups)
    whole = best_of_all(overlap, slots, nodes, groups)
    expected = whole or best_of_all(overlap, slots, nodes, [])
    assert expected is not None
    assert found == Assignment(expected[1], expected[0], True, whole is not None)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks", [7, 8])
def test_eight_slots_with_pairs_equals_all_permutations(seed: int, ranks: int) -> None:
    overlap = np.random.default_rng(seed).integers(0, 4, (ranks, 8))
    nodes = dict(enumerate("aaabbbcc"))
    groups = [[0, 1], [2, 3], [4, 5]]
    expected = best_of_all(overlap, range(8), nodes, groups)
    assert expected is not None
    assert assign(overlap, range(8), nodes, groups) == Assignment(expected[1], expected[0], True, True)


def test_ranks_keep_the_lowest_slots_when_nothing_is_held() -> None:
    assert assign(np.zeros((3, 5)), [9, 2, 7, 4, 5], dict.fromkeys(range(10), "a"), []).slot_of_rank == (2, 4, 5)


def test_same_configuration_stays_where_it_is() -> None:
    model = small_model()
    for parallel in (config(tp=2, dp=2, zero=True), config(pp=4), config(dp=4)):
        held = layouts_on(range(4), parallel, model)
        overlap = overlap_nbytes(held, expected_layouts(model, parallel), range(4))
        found = assign(overlap, range(4), dict(enumerate("aabb")), parallel.tensor_groups())
        assert found.slot_of_rank == (0, 1, 2, 3)


def test_group_is_dropped_when_no_node_has_room() -> None:
    found = assign(np.eye(2, dtype=np.int64)[::-1], [0, 1], {0: "a", 1: "b"}, [[0, 1]])
    assert found == Assignment((1, 0), 2, True, False)


def test_spare_slots_let_a_group_leave_a_split_node() -> None:
    """Most bytes lie across two nodes; the pair gives them up for one node."""
    overlap = np.array([[9, 0, 1, 0], [0, 9, 0, 1]])
    found = assign(overlap, range(4), {0: "a", 1: "b", 2: "c", 3: "c"}, [[0, 1]])
    assert found == Assignment((2, 3), 2, True, True)


def test_many_groups_stay_whole_and_on_their_bytes() -> None:
    """64 ranks in pairs on shuffled nodes of 8: above the exact size, still proved where all bytes are kept."""
    rng = np.random.default_rng(0)
    placed = rng.permutation(32)
    overlap = np.zeros((64, 64), dtype=np.int64)
    for pair, where in enumerate(placed):
        for member in range(2):
            overlap[2 * pair + member, 2 * where + member] = 10**9 + pair
    nodes = {slot: f"node{slot // 8}" for slot in range(64)}
    groups = [[2 * pair, 2 * pair + 1] for pair in range(32)]
    found = assign(overlap, range(64), nodes, groups)
    assert found.groups_are_whole
    assert found.is_optimal
    assert found.nbytes_kept == overlap.sum()


def test_many_groups_that_must_give_up_bytes_are_not_called_optimal() -> None:
    rng = np.random.default_rng(1)
    overlap = rng.integers(0, 10**9, (64, 72))
    nodes = {slot: f"node{slot // 8}" for slot in range(72)}
    groups = [list(range(first, first + 4)) for first in range(0, 64, 4)]
    found = assign(overlap, range(72), nodes, groups)
    assert found.groups_are_whole
    assert not found.is_optimal
    assert len(set(found.slot_of_rank)) == 64
    assert found == assign(overlap, range(72), nodes, groups)


def test_many_groups_that_cannot_fit_are_dropped() -> None:
    nodes = {slot: f"node{slot // 3}" for slot in range(36)}
    groups = [list(range(first, first + 2)) for first in range(0, 36, 2)]
    found = assign(np.zeros((36, 36), dtype=np.int64), range(36), nodes, groups)
    assert not found.groups_are_whole
    assert found.slot_of_rank == tuple(range(36))


@pytest.mark.parametrize(
    ("ranks", "slots", "groups", "message"),
    [
        (3, [0, 1], [], "3 ranks need as many slots, there are 2"),
        (1, [0, 0], [], "name a slot twice"),
        (1, [0, 7], [], r"no node is given for slots \[7\]"),
        (2, [0, 1], [[0, 1], [1]], "disjoint sets of ranks below 2"),
        (2, [0, 1], [[0, 2]], "disjoint sets of ranks below 2"),
    ],
)
def test_arguments_that_do_not_fit(ranks: int, slots: list[int], groups: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign(np.zeros((ranks, len(slots))), slots, {0: "a", 1: "a"}, groups)


def test_matching_of_large_numbers_is_exact() -> None:
    """A difference of one byte in petabytes still decides."""
    value = np.full((3, 3), 2**50, dtype=np.int64)
    value[0, 2] += 1
    assert best_matching(value) == [2, 0, 1]


def test_overlap_counts_elements_that_are_in_place() -> None:
    model = small_model()
    before, after = config(tp=2, dp=2, zero=True), config(tp=3, zero=True)
    held = layouts_on([5, 1, 2, 8], before, model)
    wanted = expected_layouts(model, after)
    ids = logical_arrays(list(held.values()))
    slots = [8, 1, 5, 2, 6]
    expected = np.zeros((3, 5), dtype=np.int64)
    for rank, layout in enumerate(wanted):
        for column, slot in enumerate(slots):
            here = {
                element
                for shard in held.get(slot, ())
                for element in np.ravel(ids[shard.tensor.key][shard.box.slices_in(Box.whole(shard.tensor.shape))])
            }
            for shard in layout:
                elements = np.ravel(ids[shard.tensor.key][shard.box.slices_in(Box.whole(shard.tensor.shape))])
                expected[rank, column] += sum(e in here for e in elements) * shard.tensor.itemsize
    np.testing.assert_array_equal(overlap_nbytes(held, wanted, slots), expected)


def test_overlap_of_tied_copies_is_counted_once() -> None:
    tensor = TensorSpec("param", "w", (4,), "float32", 4)
    twice = (Shard(tensor, Box((0,), (3,))), Shard(tensor, Box((1,), (3,))))
    assert overlap_nbytes({0: twice}, [(Shard(tensor, Box((0,), (4,))),)], [0]).tolist() == [[16]]
