"""Runs that grow, shrink and are asked to change, with results that are known beforehand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from ray.train import ScalingConfig, WorkerGroupError
from runs import check_exact, finish, start, wait_for_step, wait_until
from toy import train

import ray_etc
from ray_etc import ElasticTrainer, ParallelConfig
from ray_etc.actors.faults import Fault

pytestmark = pytest.mark.ray


def test_loop_without_steps_is_told_what_to_do(nodes: Any, tmp_path: Path) -> None:
    nodes.add(1)
    trainer = ElasticTrainer(lambda: None, scaling_config=ScalingConfig(num_workers=1))
    with pytest.raises(WorkerGroupError, match=r"iterate over ray_etc.steps\(state, total=...\)"):
        trainer.fit()


def test_fewer_slots_than_asked_for(nodes: Any) -> None:
    nodes.add(1)
    trainer = ElasticTrainer(train, scaling_config=ScalingConfig(num_workers=(2, 4)), start_timeout_s=3.0)
    with pytest.raises(WorkerGroupError, match=r"1 slots of {'CPU': 1.0} after 3 s, but num_workers=\(2, 4\) needs 2"):
        trainer.fit()


def test_no_slot_at_all_is_not_cured_by_fewer_workers(nodes: Any) -> None:
    nodes.add(1)
    trainer = ElasticTrainer(train, scaling_config=ScalingConfig(num_workers=1, use_gpu=True), start_timeout_s=3.0)
    with pytest.raises(
        WorkerGroupError, match=r"0 slots of {'GPU': 1.0} .* add nodes, or ask for less a worker \(use_gpu"
    ):
        trainer.fit()


def test_begins_with_fewer_replicas_than_slots_where_those_can_share_the_batch(
    nodes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.add(3)
    run = start(tmp_path, (1, 3), batch=4)
    wait_for_step(run)
    assert run.status().slots_usable == 3
    result = finish(run, tmp_path)
    check_exact(result)
    assert {len(ranks) for ranks in result.reports.values()} == {2}
    assert result.resizes == []
    refusal = "batch 4 cannot be split by data_parallel=3; use a divisor of 4"
    [said] = [record.getMessage() for record in caplog.records if record.name == "ray_etc.first_choice"]
    assert said == f"begins with TP1 PP1 DP2 ZeRO-1, on 2 of 3 slots: {refusal}"


@pytest.mark.slow
def test_an_error_that_fewer_replicas_would_not_cure_is_not_hidden(nodes: Any, tmp_path: Path) -> None:
    nodes.add(3)
    with pytest.raises(WorkerGroupError, match=r"\nBatchNotShared: batch 4 cannot be split by data_parallel=3; use a "):
        start(tmp_path, 3, batch=4).result(60.0)
    with pytest.raises(WorkerGroupError, match=r"\nRuntimeError: injected fault at build\nraised on rank 0"):
        start(tmp_path, (1, 3), batch=4, faults={(0, 0): Fault("build", "raise")}).result(60.0)


@pytest.mark.slow  # test_autoscaler.py does the same, with nodes that an autoscaler adds and removes
def test_dp2_to_dp4_when_a_node_joins_and_back_when_it_drains(nodes: Any, tmp_path: Path) -> None:
    nodes.add(2)
    run = start(tmp_path, (1, 4), slots=2)
    wait_for_step(run)
    assert run.status().parallel == ParallelConfig(data_parallel=2)
    plan = run.plan(4)
    assert plan.nbytes_wire > 0
    joined = nodes.add(2)
    wait_until(run, lambda: len(run.resizes) == 1 and run.resizes[0].pause_s is not None)
    wait_for_step(run)
    deadline = time.time() + 30
    ray_etc.drain_node(joined.node_id, 30.0, "spot notice")
    wait_until(run, lambda: len(run.resizes) == 2 and run.resizes[1].pause_s is not None)
    assert time.time() < deadline
    wait_for_step(run)
    result = finish(run, tmp_path)
    check_exact(result)
    grow, shrink = result.resizes
    assert (grow.parallel_to.data_parallel, shrink.parallel_to.data_parallel) == (4, 2)
    assert grow.certified
    assert shrink.certified
    assert shrink.deadline is not None
    assert shrink.paused_at is not None
    assert shrink.paused_at < shrink.deadline
    assert grow.nbytes_wire == grow.nbytes_lower_bound == plan.nbytes_wire
    assert result.return_value == "trained"


def test_impossible_requests_are_refused_before_anything_starts(nodes: Any, tmp_path: Path) -> None:
    nodes.add(2)
    run = start(tmp_path, (1, 8), slots=2)
    wait_for_step(run)
    with pytest.raises(ValueError, match="batch 12 cannot be split by data_parallel=5; use a divisor of 12"):
        run.resize(5)
    with pytest.raises(ValueError, match=r"needs 9 ranks, num_workers=\(1, 8\) allows 1 to 8"):
        run.resize(9)
    with pytest.raises(ValueError, match="either num_workers or parallel"):
        run.resize()
    with pytest.raises(TypeError, match="is no whole number; a configuration goes into parallel="):
        run.resize(ParallelConfig(data_parallel=2))  # type: ignore[arg-type]
    assert run.resizes == []
    check_exact(finish(run, tmp_path))
    with pytest.raises(RuntimeError, match=r"^the run has ended, so nothing would move$"):
        run.plan(1)


def test_user_error_names_rank_and_step_and_comes_first(nodes: Any, tmp_path: Path) -> None:
    nodes.add(2)
    run = start(tmp_path, 2, faults={(0, 1): Fault("step:4", "raise")})
    with pytest.raises(WorkerGroupError) as caught:
        run.result(60.0)
    message = str(caught.value).partition("\n")[2]
    assert message.startswith("RuntimeError: injected fault at step:4\nraised on rank 1")
    assert "step 4" in message
    assert 'script(f"step:{step}")' in message
    assert isinstance(caught.value.worker_failures[1], RuntimeError)


@pytest.mark.parametrize("given", [{"slot_nbytes": "1GB"}, {"timeout_s": 0}, {"start_timeout_s": -1.0}])
def test_limits_that_are_none(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^(slot_nbytes|timeout_s|start_timeout_s)=.* must be a number above 0$"):
        ElasticTrainer(train, **given)


def test_axes_that_num_workers_cannot_hold() -> None:
    with pytest.raises(ValueError, match=r"num_workers=\(2, 3\) has no multiple of .* = 4 ranks; raise num_workers"):
        ElasticTrainer(
            train,
            parallel=ParallelConfig(tensor_parallel=2, pipeline_parallel=2),
            scaling_config=ScalingConfig(num_workers=(2, 3)),
        )


def test_links_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"links\.json is not a table of links: .*No such file"):
        ElasticTrainer(train, links=tmp_path / "links.json")
