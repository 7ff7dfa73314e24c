"""The baseline of `benchmarks.end_to_end`: the same training, which saves, ends, starts anew and loads to resize.

Nothing here imports torch at the top: a restarted process imports it when it is told to, so that this can be timed.
"""

from __future__ import annotations

import pickle
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.end_to_end_figures import Step, back_to_normal, largest_difference, of_all_ranks
from benchmarks.processes import Process, call_all, each_its_own
from ray_etc.planners.parallel import ParallelConfig

if TYPE_CHECKING:
    from benchmarks.checkpoints import State
    from ray_etc.megatron import Task

STEPS_BEFORE = 5
STEPS_AFTER = 16
WRITE_S = 120.0
SAME_LOSS = 0.5
"""Between two runs whose sums are in another order and which drift apart: 5e-6, 6e-4 and 4e-2 were seen on CPUs after
one, two and three restarts. What is loaded is compared by its bits; this shows that training goes on with it."""
REHEARSED = 8
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
SHAPES = {"grow": ParallelConfig(tensor_parallel=2), "shrink": ParallelConfig()}


@dataclass(frozen=True)
class Way:
    """How a restarted job keeps its state: a format, and the kind of folder that it is written to."""

    format: str
    place: str


WAYS = (
    Way("dcp", "memory"),
    Way("megatron", "memory"),
    Way("dcp_async", "memory"),
    Way("dcp", "disk"),
    Way("megatron", "disk"),
)
"""An odd number: growing and shrinking in turn, each is taken both ways in two rounds."""


class TrainingRank:
    """One rank of a job that knows nothing of resizes."""

    def ready(self) -> None:
        """Answers once the process is there."""

    def import_modules(self) -> None:
        import benchmarks.checkpoints
        import benchmarks.end_to_end_training  # noqa: F401

    def build(self, rank: int, parallel: ParallelConfig, store: str, config: dict[str, Any], use_cpu: bool) -> int:
        """Process groups and model; the bytes of this rank's state."""
        import torch
        import torch.distributed as dist

        from benchmarks.end_to_end_training import build

        self._rank, self._parallel, self._step = rank, parallel, 0
        if not use_cpu:
            torch.cuda.set_device(rank)
        world = parallel.world_size
        meeting = dist.FileStore(store, world)
        dist.init_process_group("gloo" if use_cpu else "nccl", store=meeting, rank=rank, world_size=world)
        # What checkpoints tell each other, also while training goes on.
        self._side_group: Any = dist.new_group(backend="gloo")
        self._task: Task = build(config, parallel)
        self._state = as_dtensors(self._task)
        return sum(shard.view.nbytes for shard in self._task.state.shards)

    def train(self, count: int) -> list[Step]:
        from benchmarks.end_to_end_training import timed_step

        steps = []
        for _ in range(count):
            steps.append(timed_step(self._task, self._step))
            self._step += 1
        return steps

    def rehearse(self, how: str, folder: str) -> None:
        """Save a few tensors: a job that is under way has saved before, and has set up what a first save needs."""
        self._save(how, dict(list(self._state.items())[:REHEARSED]), folder)
        if how == "dcp_async":
            self._written.result()

    def save(self, how: str, folder: str) -> None:
        """Until the checkpoint is whole; an asynchronous one until training can go on."""
        from ray_etc.actors.small_state import SmallState

        small = SmallState.of(self._task.state), self._parallel.coordinate(self._rank), self._step
        self._save(how, self._state, folder)
        Path(f"{folder}.small{self._rank}").write_bytes(pickle.dumps(small))

    def _save(self, how: str, state: State, folder: str) -> None:
        from benchmarks import checkpoints

        if how == "dcp":
            checkpoints.dcp_save(state, folder, self._side_group)
        elif how == "megatron":
            checkpoints.megatron_save(state, folder)
        else:
            self._written = checkpoints.dcp_async_save(state, folder, self._side_group)

    def sums(self) -> dict[str, int]:
        """Of the bits of each tensor, over this rank's part; 0 where another rank counts it."""
        import torch
        from torch.distributed.tensor import Replicate

        sums = {}
        for name, tensor in self._state.items():
            bits = tensor.to_local().view({2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])
            is_mine = self._rank == 0 or tensor.placements != (Replicate(),)
            sums[name] = bits.sum(dtype=torch.int64) if is_mine else torch.zeros((), dtype=torch.int64)
        return {name: int(each) for name, each in sums.items()}

    def is_saved(self) -> bool:
        """Raises what went wrong in the background."""
        if not self._written.done():
            return False
        self._written.result()
        return True

    def load(self, how: str, folder: str) -> None:
        import torch

        from benchmarks import checkpoints
        from ray_etc.actors.small_state import load_small_state

        if how == "megatron":
            checkpoints.megatron_load(self._state, folder)
        else:
            checkpoints.dcp_load(self._state, folder, self._side_group)
        saved = [pickle.loads(path.read_bytes()) for path in Path(folder).parent.glob(f"{Path(folder).name}.small*")]
        streams = {coordinate: small.streams for small, coordinate, _ in saved}
        small, _, self._step = saved[0]
        own = self._parallel.coordinate(self._rank)
        load_small_state(self._task.state, small.replicated, streams, own, self._step)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def as_dtensors(task: Task) -> State:
    """The training state under tensor parallelism alone: each tensor is whole on every rank, or split along one dim."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Placement, Replicate
    from torch.distributed.tensor import Shard as ShardDim

    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
    state: State = {}
    for shard in task.state.shards:
        split = [dim for dim, size in enumerate(shard.tensor.shape) if shard.box.lengths[dim] < size]
        placement: Placement = ShardDim(split[0]) if split else Replicate()
        tensor = DTensor.from_local(shard.view, mesh, [placement], run_check=False)
        name = f"{shard.tensor.kind}.{shard.tensor.name}"
        if name in state or tuple(tensor.shape) != shard.tensor.shape:
            raise ValueError(f"{name}: {shard.box} is not an even part along one dim")
        state[name] = tensor
    return state


class Job:
    """The processes of one configuration, and when each part of their start was over."""

    def __init__(self, parallel: ParallelConfig, config: dict[str, Any], use_cpu: bool) -> None:
        self.moments: list[tuple[str, float]] = []
        self._store = Path(tempfile.gettempdir(), f"ray_etc-store-{uuid.uuid4().hex}")
        self._ranks = [Process(TrainingRank, environment=ENVIRONMENT) for _ in range(parallel.world_size)]
        try:
            self._timed("start", "ready")
            self._timed("import", "import_modules")
            arguments = [(rank, parallel, str(self._store), config, use_cpu) for rank in range(parallel.world_size)]
            self.state_nbytes = sum(each_its_own(self._ranks, "build", arguments))
            self.moments.append(("build", time.time()))
        except BaseException:
            self.kill()
            raise

    def train(self, count: int) -> list[Step]:
        return [of_all_ranks(step) for step in zip(*self.call("train", count), strict=True)]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return call_all(self._ranks, method, *arguments)

    def sums(self) -> dict[str, int]:
        """Of the bits of each whole tensor, whatever the configuration."""
        parts = self.call("sums")
        return {name: sum(part[name] for part in parts) for name in parts[0]}

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._store.unlink(missing_ok=True)

    def _timed(self, part: str, method: str) -> None:
        self.call(method)
        self.moments.append((part, time.time()))


def measure_restarts(
    config: dict[str, Any],
    use_cpu: bool,
    folders: dict[str, Path],
    losses: dict[int, float],
    unbroken_steps: int,
    has_time_for: Callable[[float], bool],
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """First a run that is never resized, of so many steps, to compare `losses` with; then one restart after another.

    Args:
        folders: where checkpoints are written, by the kind of folder.
        losses: of the elastic run, by step.
        has_time_for: whether so many more seconds may be spent; what there is no time for is left out, and named.
    """
    result: dict[str, Any] = {"restarts": [], "left_out": []}
    job = Job(SHAPES["shrink"], config, use_cpu)
    try:
        unbroken = {step.number: step.loss for step in job.train(unbroken_steps)}
        result["state_nbytes"] = job.state_nbytes
        result["unbroken_steps"] = unbroken_steps
        result["loss_unbroken"] = [round(loss, 5) for loss in unbroken.values()]
        result["loss_difference_from_unbroken"] = largest_difference(unbroken, losses)
        keep(result)
        # Untimed: it has the machine find memory for the files.
        with _checkpoint_folder(folders["memory"]) as folder:
            job.call("save", "dcp", str(folder))
        longest_s = 0.0
        for direction, way in islice(zip(cycle(SHAPES), cycle(WAYS), strict=False), 2 * len(WAYS)):
            what = {"resize": direction, "format": way.format, "place": way.place}
            free = shutil.disk_usage(folders[way.place]).free
            # Once one is left out, so is the rest: the next would start from the other configuration.
            if result["left_out"] or free < 1.2 * job.state_nbytes or not has_time_for(longest_s):
                result["left_out"].append({**what, "bytes_free": free})
                continue
            began = time.monotonic()
            try:
                with _checkpoint_folder(folders[way.place]) as folder:
                    job, steps, figures = _restart(job, way, SHAPES[direction], config, use_cpu, folder)
            except Exception as error:  # the others are still worth their time, from a new run
                figures = {"error": f"{type(error).__name__}: {error}"}
                job.kill()
                job = Job(SHAPES[direction], config, use_cpu)
            else:
                difference = largest_difference({step.number: step.loss for step in steps}, losses)
                figures["loss_difference_from_elastic"] = difference
            result["restarts"].append({**what, **figures})
            keep(result)
            longest_s = max(longest_s, time.monotonic() - began)
    finally:
        job.kill()
    differences = [
        result["loss_difference_from_unbroken"],
        *(each.get("loss_difference_from_elastic") for each in result["restarts"]),
    ]
    result["is_right"] = all(each.get("is_loaded", False) for each in result["restarts"]) and all(
        each is None or each < SAME_LOSS for each in differences
    )
    keep(result)
    return result


@contextmanager
def _checkpoint_folder(parent: Path) -> Iterator[Path]:
    """The path of a checkpoint, in a folder that is removed afterwards."""
    folder = parent / f"ray_etc-restart-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield folder / "checkpoint"
    finally:
        shutil.rmtree(folder)


def _restart(
    job: Job, way: Way, parallel: ParallelConfig, config: dict[str, Any], use_cpu: bool, folder: Path
) -> tuple[Job, list[Step], dict[str, Any]]:
    """From the end of a step to the start of the next one, in new processes: they, their steps, and the figures."""
    job.call("rehearse", way.format, f"{folder}-rehearsal")
    ended_at = job.train(STEPS_BEFORE)[-1].ended_at
    moments = [("", ended_at)]

    def done(part: str) -> None:
        moments.append((part, time.time()))

    def check(of: Job = job) -> dict[str, int]:
        """Takes no part in the restart: its time is taken off."""
        sums = of.sums()
        done("check")
        return sums

    job.call("save", way.format, str(folder))
    lost_steps = 0
    if way.format == "dcp_async":
        done("stall")
        held = check()
        deadline = time.monotonic() + WRITE_S
        while not all(job.call("is_saved")):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the checkpoint was not written within {WRITE_S:.0f} s")
            job.train(1)
            lost_steps += 1
        done("write")  # training goes on meanwhile, by steps that are lost
    else:
        done("save")
        held = check()
    job.kill()
    done("stop")
    new = Job(parallel, config, use_cpu)
    try:
        moments += new.moments
        new.call("load", way.format, str(folder))
        done("load")
        is_loaded = check(new) == held
        steps = new.train(STEPS_AFTER)
    except BaseException:
        new.kill()
        raise
    spent = [(part, at - before) for (_, before), (part, at) in pairwise(moments)]
    checked_s = sum(seconds for part, seconds in spent if part == "check")
    figures = {
        "restart_s": steps[0].started_at - ended_at - checked_s,
        "parts_s": {part: seconds for part, seconds in spent if part != "check"},
        "is_loaded": is_loaded,
        "lost_steps": lost_steps,
        "first_step": steps[0].number,
        **back_to_normal(steps, ended_at + checked_s),
    }
    return new, steps, figures
