"""What the demo's ranks run."""

from __future__ import annotations

import time
from typing import Any

import ray_etc

GLOBAL_BATCH_SIZE = 16


def train(config: dict[str, Any]) -> None:
    """Train a small GPT. `config`: model, optimizer, data, steps, seed, and `step_s`, the least time of a step."""
    from ray_etc import megatron

    context = ray_etc.get_context()
    task = megatron.build(
        config["model"],
        context.parallel,
        optimizer=config["optimizer"],
        data=config["data"],
        global_batch_size=GLOBAL_BATCH_SIZE,
        micro_batch_size=2,
        seed=config["seed"],
    )
    is_first_step = True
    for _ in ray_etc.steps(task.state, total=config["steps"]):
        start = time.monotonic()
        metrics = task.train_step()
        step_s = time.monotonic() - start
        metrics["tokens_per_s"] = metrics["tokens"] / step_s
        ray_etc.report({**metrics, "coordinate": tuple(context.coordinate)})
        if context.generation < config["unhurried_generations"] and not is_first_step:
            time.sleep(max(0.0, config["step_s"] - step_s))
        is_first_step = False
