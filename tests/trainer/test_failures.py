"""Failures scripted by event. In each the state is exact afterwards: bit for bit that of a run without any failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.train import WorkerGroupError
from runs import check_exact, fail, finish, start, wait_for_step, wait_until

from ray_etc import ElasticCallback, ParallelConfig, ResizeFailed, StateLost
from ray_etc.actors.faults import Fault

pytestmark = pytest.mark.ray

PLAIN = ParallelConfig(distributed_optimizer=False)


ONE = ParallelConfig()
TWO = ParallelConfig(data_parallel=2, distributed_optimizer=False)
TIMEOUT_S = 6.0

FAILURES = {
    "new rank dies while it builds": (ONE, Fault("build", "kill"), "rank 0 of the new generation died"),
    "memory runs out while a rank builds": (
        ONE,
        Fault("build", "exhaust"),
        "could not be built: (?s:.*)allocate memory",
    ),
    "peer never joins": (ONE, Fault("connect", "stall"), "never joined|waited 6 s for the migration group"),
    "memory runs out for the buffers": (ONE, Fault("prepare", "exhaust"), "allocate memory"),
    "peer dies in a round": (TWO, Fault("round:0:packed", "kill"), "rank . of the new generation died|TransportError"),
    "peer is silent in a round": (ONE, Fault("round:0:packed", "stall"), "TransportTimeout|waited 6 s for the state"),
    "group is aborted in a round": (ONE, Fault("round:0:packed", "abort"), "TransportError: .*aborted"),
    "error in a round": (ONE, Fault("local:done", "raise"), "injected fault at local:done"),
    "byte is corrupted": (
        ONE,
        Fault("round:0:unpacked", "corrupt", shard=1),
        r"1 moves failed their certificate: exp_avg weight\[0:30\]",
    ),
}


FEW = ("memory runs out while a rank builds", "peer dies in a round", "peer is silent in a round", "byte is corrupted")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("names", [FEW, pytest.param(tuple(FAILURES), marks=pytest.mark.slow)], ids=["few", "all"])
def test_resizes_fail_one_after_the_other_and_the_old_generation_goes_on(
    nodes: Any, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """From ZeRO-1 on two ranks. In a resize to one, the old rank that leaves is a member beside the new one."""
    nodes.add(2)
    script = tmp_path / "script"
    run = start(tmp_path, (1, 2), timeout_s=TIMEOUT_S, faults=script)
    wait_for_step(run)
    resumed_s = {}
    for name in names:
        parallel, fault, reason = FAILURES[name]
        last = parallel.world_size - 1
        resumed_s[name] = fail(run, script, {(1, last): fault}, parallel, reason)
    assert run.resize(1).certified
    wait_for_step(run)
    result = finish(run, tmp_path)
    check_exact(result)
    assert [record.certified for record in result.resizes] == [False] * len(names) + [True]
    late = 4.0  # for the abort, and for the step of a busy machine
    assert all(each < TIMEOUT_S + late for each in resumed_s.values()), resumed_s


def test_rank_dies_with_its_zero1_shard_and_the_error_names_it(nodes: Any, tmp_path: Path) -> None:
    nodes.add(2)
    run = start(tmp_path, (1, 2), faults={(0, 1): Fault("step:5", "kill")})
    message = "StateLost: rank 1 died, and the survivors do not hold the whole state"
    with pytest.raises(WorkerGroupError, match=message) as caught:
        run.result(90.0)
    assert isinstance(caught.value.__cause__, StateLost)
    assert "exp_avg weight offsets (30,) lengths (30,): 30 elements, 120 bytes" in str(caught.value)


def test_leaving_rank_dies_in_the_handover(nodes: Any, tmp_path: Path) -> None:
    """The old generation loses a rank while it stands still; what it held is on the other one."""
    nodes.add(2)
    fault = Fault("local:done", "kill")  # only the one that leaves takes part in the move
    run = start(tmp_path, (1, 2), parallel=PLAIN, faults={(0, 0): fault, (0, 1): fault})
    wait_for_step(run)
    with pytest.raises(ResizeFailed):
        run.resize(parallel=ParallelConfig(data_parallel=1, distributed_optimizer=True))
    wait_until(run, lambda: run.status().generation == 1)
    wait_for_step(run)
    check_exact(finish(run, tmp_path), died=1)


@pytest.mark.slow
def test_rank_dies_where_num_workers_is_fixed(nodes: Any, tmp_path: Path) -> None:
    """The dead rank's slot must be given up before Ray can place another one."""
    nodes.add(2)
    run = start(tmp_path, 2, parallel=PLAIN, faults={(0, 1): Fault("step:5", "kill")})
    wait_until(run, lambda: run.status().generation == 1)
    wait_for_step(run)
    result = finish(run, tmp_path)
    check_exact(result, died=1)
    assert result.resizes[0].parallel_to == PLAIN.with_world_size(2)


def test_every_rank_dies(nodes: Any, tmp_path: Path) -> None:
    nodes.add(2)
    run = start(tmp_path, 2, parallel=PLAIN, faults={(0, rank): Fault("step:5", "kill") for rank in range(2)})
    with pytest.raises(WorkerGroupError, match="StateLost: every rank died"):
        run.result(60.0)


class Raising(ElasticCallback):
    """A user's callback with a mistake in it."""

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        raise ValueError("a mistake")

    def after_resize(self, record: Any) -> None:
        raise ValueError("a mistake")


def test_callback_that_raises_breaks_nothing_and_stop_returns_what_there_is(nodes: Any, tmp_path: Path) -> None:
    nodes.add(2)
    run = start(tmp_path, (1, 2), callbacks=[Raising()])
    wait_for_step(run)
    assert run.resize(1).certified
    wait_for_step(run)
    run.stop()
    result = run.result(30.0)
    assert result.return_value is None
    assert run.status().activity == "ended"
    check_exact(result)


def test_rank_dies_in_plain_dp3_and_no_step_is_lost(nodes: Any, tmp_path: Path) -> None:
    nodes.add(3)
    run = start(tmp_path, (1, 3), parallel=PLAIN, faults={(0, 1): Fault("step:5", "kill")})
    wait_until(run, lambda: run.status().generation == 1)
    wait_for_step(run)
    result = finish(run, tmp_path)
    check_exact(result, died=1)
    [recovery, *_] = result.resizes
    assert recovery.reason == "rank 1 died"
    assert recovery.next_step == 5
    assert recovery.certified


def test_node_dies_without_notice_in_plain_dp2(nodes: Any, tmp_path: Path) -> None:
    nodes.add(1)
    doomed = nodes.add(1)
    run = start(tmp_path, (1, 2), parallel=PLAIN)
    wait_for_step(run)
    nodes.kill(doomed)
    wait_until(run, lambda: run.status().generation == 1)
    wait_for_step(run)
    result = finish(run, tmp_path)
    died = int(result.resizes[0].reason.split()[1])  # either rank may have been on that node
    check_exact(result, died=died)
    assert result.resizes[0].parallel_to.data_parallel == 1
