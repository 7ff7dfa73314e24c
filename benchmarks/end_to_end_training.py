"""What trains in `benchmarks.end_to_end`, by `ElasticTrainer` and in processes that are restarted."""

from __future__ import annotations

import time
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
    started_at = time.time()
    loss = task.train_step()["loss"]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Step(number, started_at, time.time(), loss)


def train(config: dict[str, Any]) -> None:
    """The train loop: until the run is stopped."""
    task = build(config, ray_etc.get_context().parallel)
    for number in ray_etc.steps(task.state, total=NEVER):
        ray_etc.report({"step": timed_step(task, number)})
