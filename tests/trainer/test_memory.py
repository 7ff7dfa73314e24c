"""Resizes where a slot has too little memory for the old and the new state together, or the links too little speed.

A rank of DP2 with ZeRO-1 holds 60 weights and 30 moments, 360 bytes; one of plain DP2 120 numbers, 480 bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.train import WorkerGroupError
from runs import check_exact, finish, start, wait_for_step, wait_until

import ray_etc
from ray_etc import Links, ParallelConfig, ResizeFailed
from ray_etc.actors.faults import Fault

pytestmark = pytest.mark.ray

ZERO, PLAIN = ParallelConfig(data_parallel=2), ParallelConfig(data_parallel=2, distributed_optimizer=False)


def test_zero1_to_plain_dp2_phase_by_phase_and_back_where_there_is_room(nodes: Any, tmp_path: Path) -> None:
    nodes.add(2)
    run = start(tmp_path, (1, 2), slot_nbytes=900)
    wait_for_step(run)
    records = [run.resize(parallel=parallel) for parallel in (PLAIN, ZERO)]
    wait_for_step(run)
    result = finish(run, tmp_path)
    check_exact(result)
    there, back = records
    assert there.certified
    assert there.memory_mode == "tight"
    assert there.nbytes_peak == there.nbytes_peak_predicted == 360 + 240 + 2 * 128
    assert back.certified
    assert back.memory_mode == "safe"  # nothing goes over the wire, so there is no staging
    assert back.nbytes_peak == back.nbytes_peak_predicted == 480 + 360


def test_peak_is_the_one_predicted_where_slots_also_join_and_leave(nodes: Any, tmp_path: Path) -> None:
    """Packed, half of the moments take 128 bytes of staging, and a new rank's state 240 and 128."""
    nodes.add(2)
    run = start(tmp_path, (1, 2))
    wait_for_step(run)
    records = [run.resize(1), run.resize(2)]
    check_exact(finish(run, tmp_path))
    shrink, grow = records
    assert shrink.nbytes_peak == shrink.nbytes_peak_predicted == 360 + 480 + 128
    assert grow.nbytes_peak == grow.nbytes_peak_predicted == 480 + 360 + 240 + 128


def test_peak_where_one_slot_only_leaves_and_another_only_joins(nodes: Any, tmp_path: Path) -> None:
    node = nodes.add(1)
    run = start(tmp_path, 1)
    wait_for_step(run)
    nodes.add(1)
    ray_etc.drain_node(node.node_id, 60.0, "spot notice")
    wait_until(run, lambda: len(run.resizes) == 1 and run.resizes[0].pause_s is not None)
    result = finish(run, tmp_path)
    check_exact(result)
    [move] = result.resizes
    assert move.nbytes_peak == move.nbytes_peak_predicted == 480 + 480


@pytest.mark.parametrize("has_no_room", [False, True], ids=["as the plan says", "as its build runs out of memory"])
def test_plain_to_zero1_that_holds_more_than_expected_begins_again_phase_by_phase(
    nodes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, has_no_room: bool
) -> None:
    """480 bytes beside the 360 of ZeRO-1 would fit, but the new ranks turn out to hold all of the momentum."""
    nodes.add(2)
    run = start(tmp_path, (1, 2), parallel=PLAIN, slot_nbytes=900, momentum_is_whole=True, has_no_room=has_no_room)
    wait_for_step(run)
    record = run.resize(parallel=ZERO)
    wait_for_step(run)
    result = finish(run, tmp_path)
    check_exact(result)
    assert record.certified
    assert record.memory_mode == "tight"
    assert record.nbytes_peak == record.nbytes_peak_predicted == 480 + 240
    assert "generation 1 begins again, releasing the old state phase by phase" in caplog.text


@pytest.mark.slow
def test_phase_that_fails_before_anything_was_released(nodes: Any, tmp_path: Path) -> None:
    nodes.add(2)
    run = start(tmp_path, (1, 2), slot_nbytes=900, faults={(1, 1): Fault("local:done", "corrupt")})
    wait_for_step(run)
    with pytest.raises(ResizeFailed, match=r"1 moves failed their certificate: param weight\[0:60\]"):
        run.resize(parallel=PLAIN)
    wait_for_step(run)
    result = finish(run, tmp_path)
    check_exact(result)
    assert result.resizes[0].memory_mode == "tight"


@pytest.mark.parametrize(
    ("given", "reason", "not_begun"),
    [
        (
            {"slot_nbytes": 500},
            r"slot 0 on \w+ has no room for the resize: .*needs 1\.1 KiB of 500 B there are, releasing it phase by "
            r"phase 856 B of 500 B, 356 B too much",
            "prepare",
        ),
        (
            {"links": Links(same_node_bytes_per_s=2.0), "timeout_s": 50.0},
            r"to move 960 B takes 60 s at the speeds of `links`, more than timeout_s=50",
            "quiesce",
        ),
    ],
    ids=["no room", "links too slow"],
)
def test_resize_that_cannot_be_is_refused_with_the_numbers(
    nodes: Any, tmp_path: Path, given: dict[str, Any], reason: str, not_begun: str
) -> None:
    nodes.add(2)
    run = start(tmp_path, (1, 2), **given)
    wait_for_step(run)
    with pytest.raises(ResizeFailed, match=reason):
        run.resize(parallel=PLAIN)
    assert run.status().activity.startswith("training")
    wait_for_step(run)
    result = finish(run, tmp_path)
    check_exact(result)
    assert not_begun not in result.resizes[0].phases


def test_run_whose_slots_are_smaller_than_the_state_does_not_begin(nodes: Any, tmp_path: Path) -> None:
    nodes.add(2)
    with pytest.raises(
        WorkerGroupError, match=r"ValueError: a rank of .*DP2 ZeRO-1 holds 360 B of state, more than slot_nbytes=300"
    ):
        start(tmp_path, (1, 2), slot_nbytes=300).result(60.0)
