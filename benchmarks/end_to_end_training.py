"""What trains in `benchmarks.end_to_end`, by `ElasticTrainer` and in processes that are restarted."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import ray_etc
from benchmarks.end_to_end_figures import Step
from ray_etc import megatron
from ray_etc.planners.parallel import ParallelConfig

NEVER = 1_000_000


def build(config: dict[str, Any], parallel: ParallelConfig) -> megatron.Task:
    """The model of `config` under `parallel`, on text: the sources of Python's standard library, byte by byte."""
    return megatron.build(
        config["model"],
        parallel,
        optimizer=config["optimizer"],
        global_batch_size=config["global_batch_size"],
        micro_batch_size=config["micro_batch_size"],
    )


def timed_step(task: megatron.Task, number: int) -> Step:
    """One step, until the GPU is done with it."""
    started_at, waited_s = time.time(), _waited_s()
    loss = task.train_step()["loss"]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Step(number, started_at, time.time(), loss, _waited_s() - waited_s)


def _waited_s() -> float:
    """How long the threads of this process have been ready to run but had no processor, together, by Linux's count."""
    waited_ns = 0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError, IndexError):  # it may have ended, and some sandboxes do not count
            waited_ns += int((thread / "schedstat").read_text().split()[1])
    return waited_ns / 1e9


def train(config: dict[str, Any]) -> None:
    """The train loop: until the run is stopped."""
    task = build(config, ray_etc.get_context().parallel)
    for number in ray_etc.steps(task.state, total=NEVER):
        ray_etc.report({"step": timed_step(task, number)})
