"""Standby processes: the next generation is made of them, and nothing depends on them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from runs import check_exact, finish, start, wait_for_step, wait_until

from ray_etc import ElasticRun, ParallelConfig
from ray_etc.actors import standby

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PLAIN = ParallelConfig(distributed_optimizer=False)


def standby_pids(run: ElasticRun) -> dict[int, int]:
    return run._controller.watch.standbys.pids


def pids_of_generation(run: ElasticRun, generation: int) -> set[int]:
    return {
        metrics["pid"]
        for ranks in run.reports.values()
        for [metrics] in ranks.values()
        if metrics["generation"] == generation
    }


def wait_for_standbys(run: ElasticRun, number: int) -> dict[int, int]:
    wait_until(run, lambda: run.status().standbys_warm == number)
    return standby_pids(run)


def test_generations_are_made_of_standbys_whatever_happens_to_those(
    nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby is killed and replaced; a rank is killed; the standbys become the ranks; all are gone at the end."""
    monkeypatch.setattr(standby, "IDLE_PATIENCE_S", 10.0)  # other tests may leave no idle time
    nodes.add(2)
    run = start(tmp_path, (1, 2), parallel=PLAIN, warm_standbys=True)
    first = wait_for_standbys(run, 2)
    os.kill(first[0], signal.SIGKILL)
    wait_until(run, lambda: standby_pids(run).get(0) not in (first[0], None))
    second = standby_pids(run)
    assert second[1] == first[1]

    wait_for_step(run)
    victim = next(iter(pids_of_generation(run, 0)))
    os.kill(victim, signal.SIGKILL)
    wait_until(run, lambda: run.status().generation == 1)
    wait_for_step(run)
    assert pids_of_generation(run, 1) < set(second.values()), "a slot that is warm does not wait for one that is not"

    result = finish(run, tmp_path)
    died = next(rank for rank, [metrics] in result.reports[0].items() if metrics["pid"] == victim)
    check_exact(result, died=died)
    assert result.resizes[0].error is None
    left = {*first.values(), *second.values(), *standby_pids(run).values()}
    deadline = time.monotonic() + 10
    while (alive := [pid for pid in left if Path("/proc", str(pid)).exists()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive
