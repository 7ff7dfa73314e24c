"""Start the toy loop, wait for what happens to it, and compare its result with what it must be."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.train import RunConfig, ScalingConfig
from toy import BATCH, expected_weights, samples_of, train

import ray_etc
from ray_etc import ElasticRun, ElasticTrainer, ParallelConfig


def start(
    tmp_path: Path,
    workers: int | tuple[int, int],
    *,
    parallel: ParallelConfig | None = None,
    timeout_s: float = 10.0,
    callbacks: list[Any] | None = None,
    warm_standbys: bool = False,
    **config: Any,
) -> ElasticRun:
    """A run of the toy loop that goes on until `finish`."""
    return ElasticTrainer(
        train,
        train_loop_config={"finish": str(tmp_path / "finish"), **config},
        parallel=parallel,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="toy", callbacks=callbacks),
        timeout_s=timeout_s,
        warm_standbys=warm_standbys,
    ).start()


def wait_until(run: ElasticRun, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, run.status()
        if run.status().activity == "ended":
            run.result(0)
            raise AssertionError("the run ended before that")
        time.sleep(0.02)


def wait_for_step(run: ElasticRun, more: int = 3) -> None:
    target = run.status().step + more
    wait_until(run, lambda: run.status().step >= target)


def finish(run: ElasticRun, tmp_path: Path) -> ray_etc.ElasticResult:
    (tmp_path / "finish").touch()
    return run.result(30.0)


def check_exact(result: ray_etc.ElasticResult, died: int | None = None) -> None:
    """Weights bit for bit as in a run that was never resized; each sample once, in order, on every step.

    The last reports of rank `died` may have been lost with it: in those steps only its own samples may be missing.
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
