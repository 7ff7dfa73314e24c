"""Start the toy loop, wait for what happens to it, and compare its result with what it must be."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from ray.train import RunConfig, ScalingConfig
from toy import BATCH, Faults, expected_weights, samples_of, train

import ray_etc
from ray_etc import ElasticRun, ElasticTrainer, Links, ParallelConfig, ResizeFailed, controller


def start(
    tmp_path: Path,
    workers: int | tuple[int, int],
    *,
    slots: int | None = None,
    parallel: ParallelConfig | None = None,
    timeout_s: float = 30.0,
    callbacks: list[Any] | None = None,
    scaling: dict[str, Any] | None = None,
    slot_nbytes: int | None = None,
    links: Links | None = None,
    warm_standbys: bool = False,
    **config: Any,
) -> ElasticRun:
    """A run of the toy loop that goes on until `finish`, on all `slots` that there are: by default as many as it takes.

    However long a busy machine may need to place them, it does not start with fewer.
    """
    slots = slots or (workers if isinstance(workers, int) else workers[1])
    with patch.object(controller, "SETTLE_S", float("inf")):
        run = ElasticTrainer(
            train,
            train_loop_config={"finish": str(tmp_path / "finish"), **config},
            parallel=parallel,
            scaling_config=ScalingConfig(num_workers=workers, **(scaling or {})),
            run_config=RunConfig(name="toy", callbacks=callbacks),
            timeout_s=timeout_s,
            slot_nbytes=slot_nbytes,
            links=links,
            warm_standbys=warm_standbys,
        ).start()
        wait_until(run, lambda: run.status().slots_usable >= slots)
    return run


def wait_until(
    run: ElasticRun, condition: Callable[[], bool], timeout_s: float = 120.0, what: Callable[[], Any] = lambda: ""
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, (what(), run.status())
        if run.status().activity == "ended":
            run.result(30.0)  # while its processes are ended, too
            raise AssertionError("the run ended before that")
        time.sleep(0.02)


def wait_for_step(run: ElasticRun, more: int = 3) -> None:
    target = run.status().step + more
    wait_until(run, lambda: run.status().step >= target)


def write_faults(script: Path, faults: Faults) -> None:
    """For a run that was given this file as `faults`. At once there as a whole, since ranks may look at any time."""
    made = script.with_suffix(".made")
    made.write_bytes(pickle.dumps(faults))
    made.rename(script)


def fail(run: ElasticRun, script: Path, faults: Faults, parallel: ParallelConfig, reason: str) -> float:
    """Ask for a resize that fails for `reason`; `script` is the file that the run was given as `faults`.

    Afterwards the old generation has trained on and no process of the new one is left.

    Returns:
        Seconds from the fault until every rank had begun its next step.
    """
    before = run.status()
    resizes = len(run.resizes)
    write_faults(script, faults)
    with pytest.raises(ResizeFailed, match=reason):
        run.resize(parallel=parallel)
    script.unlink()
    happened = script.with_suffix(".happened")
    fault_at = float(happened.read_text())
    happened.unlink()
    [record] = run.resizes[resizes:]
    assert record.error is not None
    assert not record.certified
    assert (run.status().generation, run.status().parallel) == (before.generation, before.parallel)
    assert before.parallel is not None
    ranks = range(before.parallel.world_size)

    def next_steps() -> list[float]:
        """When each rank began its first step after the fault."""
        began = [
            [metrics["began_at"] for by_rank in run.reports.values() for metrics in by_rank.get(rank, ())]
            for rank in ranks
        ]
        return [min(after) for each in began if (after := [at for at in each if at > fault_at])]

    wait_until(run, lambda: len(next_steps()) == len(ranks))
    wait_until(run, lambda: len(rank_processes()) == len(ranks), 20.0, rank_processes)
    return max(next_steps()) - fault_at


def rank_processes() -> list[int]:
    """The ranks' processes of all runs that this process has started."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_own_rank(pid)]


def _is_own_rank(pid: int) -> bool:
    with suppress(OSError):
        if b"ray::Rank" in Path(f"/proc/{pid}/cmdline").read_bytes():
            while pid > 1 and pid != os.getpid():
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            return pid == os.getpid()
    return False


def finish(run: ElasticRun, tmp_path: Path) -> ray_etc.ElasticResult:
    (tmp_path / "finish").touch()
    return run.result(60.0)


def check_exact(result: ray_etc.ElasticResult, died: int | None = None) -> None:
    """Weights bit for bit as in a run that was never resized; each sample once, in order, on every step.

    Each rank begins a step with the very bits that it ended the last one with, and every rank of the next generation
    with the weights of the last. The last reports of rank `died` may have been lost with it: in those steps only its
    own samples may be missing.
    """
    steps = len(result.reports)
    assert sorted(result.reports) == list(range(steps))
    assert result.metrics is not None
    assert result.metrics["weight"] == expected_weights(steps)
    for step, ranks in result.reports.items():
        seen = sorted(samples_of({step: ranks}))
        whole = list(range(step * BATCH, (step + 1) * BATCH))
        if died is not None and died not in ranks and len(seen) < BATCH:
            each = BATCH // (len(ranks) + 1)
            whole = [sample for sample in whole if (sample % BATCH) // each != died]
        assert seen == whole, step
    for step in range(1, steps):
        ended, began = ({rank: metrics for rank, [metrics] in result.reports[at].items()} for at in (step - 1, step))
        for rank, metrics in began.items():
            if rank in ended and ended[rank]["generation"] == metrics["generation"]:
                assert metrics["sums"][0] == ended[rank]["sums"][1], step
            assert {each["sums"][1][0] for each in ended.values()} == {metrics["sums"][0][0]}, step
