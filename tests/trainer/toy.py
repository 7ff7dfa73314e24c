"""A training loop small enough to follow by hand: one weight vector with momentum, the momentum split by ZeRO-1.

After n steps every weight is -0.1 * sum over s < n of the momentum after step s, whatever the configuration, and
the samples of step s are s * BATCH to (s + 1) * BATCH - 1.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

import ray_etc
from ray_etc.actors.faults import Fault, FaultInjector
from ray_etc.actors.session import current_session
from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import TensorSpec
from ray_etc.planners.parallel import ParallelConfig

SIZE = 60
BATCH = 12


class Cursor:
    """Where the data stands: replicated state."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples = state_dict["samples"]


def check_parallel(parallel: ParallelConfig) -> None:
    if BATCH % parallel.data_parallel:
        raise ValueError(
            f"batch {BATCH} cannot be split by data_parallel={parallel.data_parallel}; use a divisor of {BATCH}"
        )


def split(parallel: ParallelConfig, data_rank: int, size: int) -> Box:
    if not parallel.distributed_optimizer:
        return Box((0,), (size,))
    chunk = size // parallel.data_parallel  # sizes divide by every number of replicas that BATCH divides by
    return Box((data_rank * chunk,), (chunk,))


class Momentum(torch.optim.Optimizer):
    """SGD with momentum over this rank's part of the weights, then gathered as ZeRO-1 does."""

    def __init__(self, weight: torch.nn.Parameter, momentum: torch.Tensor, box: Box) -> None:
        super().__init__([weight], {})
        self.weight, self.momentum, self.mine = weight, momentum, box.slices_in(Box.whole(tuple(weight.shape)))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.weight.grad is not None
        self.momentum.mul_(0.5).add_(self.weight.grad[self.mine])
        self.weight.data[self.mine] -= 0.1 * self.momentum


def train(config: dict[str, Any]) -> str:
    """Train until the file `finish` appears. `config` may have the `size` of the weights, and `faults` by
    (generation, rank)."""
    context = ray_etc.get_context()
    parallel, at = context.parallel, context.coordinate
    fault = config.get("faults", {}).get((context.generation, context.world_rank))
    if fault == "die while preparing":
        os.kill(os.getpid(), signal.SIGKILL)
    check_parallel(parallel)
    size = config.get("size", SIZE)
    box = split(parallel, at.data, size)
    weight, momentum = torch.nn.Parameter(torch.zeros(size)), torch.zeros(box.lengths)
    optimizer, cursor = Momentum(weight, momentum, box), Cursor()
    state = ray_etc.TrainState(
        [
            ray_etc.StateShard(TensorSpec("param", "weight", (size,), "float32", 4), Box.whole((size,)), weight.data),
            ray_etc.StateShard(TensorSpec("exp_avg", "weight", (size,), "float32", 4), box, momentum),
        ],
        replicated={"cursor": cursor},
        optimizers=[optimizer],
        check_parallel=check_parallel,
    )
    if isinstance(fault, Fault):
        current_session().on_move_event = FaultInjector([fault], state.views())
    for step in ray_etc.steps(state, total=config.get("steps", 100_000)):
        each = BATCH // parallel.data_parallel
        samples = [cursor.samples + at.data * each + i for i in range(each)]
        if fault == ("die in step", step):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == ("raise in step", step):
            raise KeyError(f"sample {samples[0]} is not there")
        gradient = torch.tensor([float(sum(samples)), float(Path(config["finish"]).exists())])
        dist.all_reduce(gradient)
        weight.grad = torch.full((size,), gradient[0].item()) * torch.arange(1, size + 1) / 1e4
        optimizer.step()
        if parallel.distributed_optimizer:
            parts = [torch.zeros(box.lengths) for _ in range(parallel.data_parallel)]
            dist.all_gather(parts, weight.data[optimizer.mine].clone())
            weight.data.copy_(torch.cat(parts))
        cursor.samples += BATCH
        told = {"generation": context.generation, "pid": os.getpid()}
        ray_etc.report({"weight": weight.data[:SIZE].tolist(), "samples": samples, **told})
        time.sleep(config.get("step_s", 0.02))
        if gradient[1].item():
            break
    return "trained"


def expected_weights(steps: int) -> list[float]:
    """The same arithmetic without torch.distributed, in one process."""
    weight, momentum = torch.zeros(SIZE), torch.zeros(SIZE)
    for step in range(steps):
        total = float(sum(range(step * BATCH, (step + 1) * BATCH)))
        momentum.mul_(0.5).add_(torch.full((SIZE,), total) * torch.arange(1, SIZE + 1) / 1e4)
        weight -= 0.1 * momentum
    return weight.tolist()


def samples_of(reports: dict[int, dict[int, list[dict[str, Any]]]]) -> list[int]:
    """Every sample that was trained on, in the order of steps and ranks."""
    return [
        sample
        for step in sorted(reports)
        for rank in sorted(reports[step])
        for metrics in reports[step][rank]
        for sample in metrics["samples"]
    ]


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
