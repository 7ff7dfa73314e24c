"""What the demo's ranks run."""

from __future__ import annotations

import time
from typing import Any

import ray_etc
from ray_etc.actors.session import current_session

GLOBAL_BATCH_SIZE = 16
UNHURRIED_STEP_S = 0.5
WAITING_STEP_S = 2.5


def train(config: dict[str, Any]) -> None:
    """Train a small GPT. `config`: model, optimizer, data, steps, seed, and the number of `resizes` to expect.

    So that the story can be followed, and ends before the steps do, a generation that is to be replaced takes its time:
    a little for its share of the steps, and ever more for those after it, however slow the machine is. Once its last
    step is named it hurries, since nothing but that is waited for.
    """
    from ray_etc import megatron

    context = ray_etc.get_context()
    task = megatron.build(
        config["model"],
        context.parallel,
        optimizer=config["optimizer"],
        data=config["data"],
        global_batch_size=GLOBAL_BATCH_SIZE,
        micro_batch_size=4,
        seed=config["seed"],
    )
    is_last_generation = context.generation >= config["resizes"]
    share = config["steps"] * (context.generation + 1) // (config["resizes"] + 1)
    is_first_step = True
    for step in ray_etc.steps(task.state, total=config["steps"]):
        start = time.monotonic()
        metrics = task.train_step()
        step_s = time.monotonic() - start
        metrics["tokens_per_s"] = metrics["tokens"] / step_s
        ray_etc.report({**metrics, "coordinate": tuple(context.coordinate)})
        if not is_first_step and not is_last_generation:
            wanted_s = UNHURRIED_STEP_S if step < share else WAITING_STEP_S * (1 + 1.5 * (step - share))
            while not current_session().is_to_pause and time.monotonic() < start + wanted_s:
                time.sleep(0.02)
        is_first_step = False
