"""A training loop small enough to follow by hand: one weight vector with momentum, the momentum split by ZeRO-1.

After n steps every weight is -0.1 * sum over s < n of the momentum after step s, whatever the configuration, and
the samples of step s are s * BATCH to (s + 1) * BATCH - 1.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

import ray_etc
from ray_etc.actors.certificate import checksums
from ray_etc.actors.context import Context
from ray_etc.actors.errors import BatchNotShared
from ray_etc.actors.faults import Fault, FaultInjector
from ray_etc.actors.session import current_session
from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import TensorSpec
from ray_etc.planners.parallel import ParallelConfig

SIZE = 60
BATCH = 12

Faults = dict[tuple[int, int], Fault]


class Cursor:
    """Where the data stands: replicated state."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples = state_dict["samples"]


def check_parallel(batch: int, parallel: ParallelConfig) -> None:
    if batch % parallel.data_parallel:
        divisors = [number for number in range(1, batch + 1) if batch % number == 0]
        raise BatchNotShared(
            f"batch {batch} cannot be split by data_parallel={parallel.data_parallel}; use a divisor of {batch}",
            divisors,
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # Without torch's decorator, whose first call loads the compiler: a third of the start of a rank.
        torch.optim.Optimizer.add_param_group.__wrapped__(self, param_group)  # type: ignore[attr-defined]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.weight.grad is not None
        self.momentum.mul_(0.5).add_(self.weight.grad[self.mine])
        self.weight.data[self.mine] -= 0.1 * self.momentum


class Script:
    """The faults that a test has written down for this rank, or will have by the time of the event.

    `faults` are by (generation, rank), or a file that holds such a dict; then the moment of a fault is left beside it.
    """

    def __init__(self, faults: Faults | Path, context: Context, folder: Path) -> None:
        self._faults, self._context, self._folder = faults, context, folder
        self._who = (context.generation, context.world_rank)
        self.views: list[torch.Tensor] = []

    def __call__(self, event: str) -> None:
        faults = _read(self._faults) if isinstance(self._faults, Path) else self._faults
        if event.startswith("step:"):
            self._await_peers(event, [who for who, fault in faults.items() if fault.event == event])
        fault = faults.get(self._who)
        if fault is not None and fault.event == event:
            if isinstance(self._faults, Path):
                self._faults.with_suffix(".happened").write_text(str(time.time()))
            FaultInjector([fault], self.views)(event)

    def _await_peers(self, event: str, whose: list[tuple[int, int]]) -> None:
        """Before a fault in a step, until every rank is in that step: a death might else undo the step before it."""
        generation = self._context.generation
        if generation not in {each for each, _ in whose}:
            return
        marks = [self._folder / f"{event}-{generation}-{rank}" for rank in range(self._context.get_world_size())]
        marks[self._context.world_rank].touch()
        while not all(mark.exists() for mark in marks):
            time.sleep(0.001)


def _read(file: Path) -> Faults:
    try:
        return pickle.loads(file.read_bytes())
    except FileNotFoundError:
        return {}


def train(config: dict[str, Any]) -> str:
    """Train until the file `finish` appears, on a GPU where there is one.

    `config` may have the `size` of the weights, `step_s`, `checkpoint_at` a step, `momentum_is_whole` for ranks that do
    not split it, whatever their configuration, `has_no_room` for later generations that cannot be built with their
    memory, a `batch` that replicas must be able to share, and `faults` for `Script`. Its events are also "build" and
    "step:i".
    """
    context = ray_etc.get_context()
    parallel, at = context.parallel, context.coordinate
    script = Script(config.get("faults", {}), context, Path(config["finish"]).parent)
    script("build")
    if config.get("has_no_room") and context.generation and context.about_step is not None:
        raise torch.OutOfMemoryError("as CUDA says it")
    check = partial(check_parallel, config.get("batch", BATCH))
    check(parallel)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = config.get("size", SIZE)
    box = Box.whole((size,)) if config.get("momentum_is_whole") else split(parallel, at.data, size)
    weight = torch.nn.Parameter(torch.zeros(size, device=device))
    momentum = torch.zeros(box.lengths, device=device)
    slope = ramp(size, device)
    optimizer, cursor = Momentum(weight, momentum, box), Cursor()
    state = ray_etc.TrainState(
        [
            ray_etc.StateShard(TensorSpec("param", "weight", (size,), "float32", 4), Box.whole((size,)), weight.data),
            ray_etc.StateShard(TensorSpec("exp_avg", "weight", (size,), "float32", 4), box, momentum),
        ],
        replicated={"cursor": cursor},
        optimizers=[optimizer],
        check_parallel=check,
    )
    script.views = state.views()
    current_session().on_move_event = script
    for step in ray_etc.steps(state, total=config.get("steps", 100_000)):
        began_at, sums = time.time(), [checksums(state.views()).tolist()]
        each = BATCH // parallel.data_parallel
        samples = [cursor.samples + at.data * each + i for i in range(each)]
        script(f"step:{step}")
        gradient = torch.tensor([float(sum(samples)), float(Path(config["finish"]).exists())], device=device)
        dist.all_reduce(gradient)
        weight.grad = gradient[0].item() * slope
        optimizer.step()
        if box.lengths != (size,):
            parts = [torch.zeros(box.lengths, device=device) for _ in range(parallel.data_parallel)]
            dist.all_gather(parts, weight.data[optimizer.mine].clone())
            weight.data.copy_(torch.cat(parts))
        cursor.samples += BATCH
        sums.append(checksums(state.views()).tolist())
        ray_etc.report(
            {
                "weight": weight.data[:SIZE].tolist(),
                "samples": samples,
                "generation": context.generation,
                "pid": os.getpid(),
                "began_at": began_at,
                "sums": sums,
                "free_nbytes": torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0,
            },
            checkpoint=checkpoint_of(step) if step == config.get("checkpoint_at") else None,
        )
        time.sleep(config.get("step_s", 0.02))
        if gradient[1].item():
            break
    return "trained"


def checkpoint_of(step: int) -> Any:
    from ray.train import Checkpoint  # brings pandas and pyarrow: only for the loops that need it

    return Checkpoint.from_directory(f"checkpoint{step}")


def ramp(size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Each weight's share of the gradient. Divided by a power of two, so that GPUs round as CPUs do."""
    return torch.arange(1, size + 1, dtype=torch.float32, device=device) / 8192


def expected_weights(steps: int) -> list[float]:
    """The same arithmetic without torch.distributed, in one process."""
    weight, momentum = torch.zeros(SIZE), torch.zeros(SIZE)
    for step in range(steps):
        total = float(sum(range(step * BATCH, (step + 1) * BATCH)))
        momentum.mul_(0.5).add_(total * ramp(SIZE))
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
