"""Resizes that fail on GPUs, one after the other in one run: aborted in time, the old generation goes on, no leaks.

With one GPU, two slots share it. The state is large enough for two rounds and for buffers that would be missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from runs import check_exact, fail, finish, start, wait_for_step, wait_until, write_faults

from ray_etc import ElasticRun, ParallelConfig, ResizeFailed
from ray_etc.actors.faults import Fault
from ray_etc.actors.transports import NcclTransport

WHY_NOT = NcclTransport.why_unavailable()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

MIB = 1 << 20
SIZE = 60 << 23
"""2 GB of weights; a rank that leaves sends 1 GB of momentum, in two rounds."""
TIMEOUT_S = 8.0
ABORT_S = 3.0
"""What an abort and the step after it may take."""
FIRST_USE_NBYTES = 512 * MIB
"""What CUDA and NCCL may keep once a rank has taken part in a move. The buffers of one that leaves are twice that."""
NOISE_NBYTES = 64 * MIB
"""What the next moves may add to it: less than a communicator."""

ONE = ParallelConfig()
TWO = ParallelConfig(data_parallel=2, distributed_optimizer=False)
NEW, OLD = [(1, 0)], [(0, 0), (0, 1)]  # of the old ranks, only the one that leaves takes part

FAILURES = {
    "peer is silent in a round": (
        NEW,
        Fault("round:1:packed", "stall"),
        "Transport(Timeout|Error)|waited 8 s for the state",
    ),
    "peer dies in a round": (NEW, Fault("round:1:packed", "kill"), "rank 0 of the new generation died|TransportError"),
    "communicator error": (OLD, Fault("round:1:packed", "abort"), "TransportError"),
    "peer never joins": (NEW, Fault("connect", "stall"), "never joined|waited 8 s for the migration group"),
    "memory runs out while a rank builds": (NEW, Fault("build", "exhaust"), "could not be built: (?s:.*)out of memory"),
    "memory runs out for the buffers": (NEW, Fault("prepare", "limit"), "out of memory"),
}


class Training:
    """A run that goes on from test to test, and the free memory of its GPUs after its first failed resize."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.script = folder, folder / "script"
        share = 1.0 if torch.cuda.device_count() > 1 else 0.5
        scaling = {"use_gpu": True, "resources_per_worker": {"GPU": share, "CPU": 1.0}}
        self.run: ElasticRun = start(
            folder, (1, 2), timeout_s=TIMEOUT_S, scaling=scaling, size=SIZE, step_s=0.05, faults=self.script
        )
        wait_for_step(self.run, 10)
        self.at_least = [free - FIRST_USE_NBYTES for free in self.free()]
        self.is_settled = False

    def free(self) -> list[int]:
        """Free bytes of each rank's GPU at its last report."""
        latest: dict[int, int] = {}
        for _, by_rank in sorted(self.run.reports.items()):
            latest.update({rank: metrics[-1]["free_nbytes"] for rank, metrics in by_rank.items()})
        return [latest[rank] for rank in sorted(latest)]

    def wait_for_memory(self) -> None:
        wait_until(
            self.run,
            lambda: all(now >= least for now, least in zip(self.free(), self.at_least, strict=True)),
            20.0,
            lambda: f"free {self.free()}, at least {self.at_least} expected",
        )
        print(f"free {[each // MIB for each in self.free()]} MiB")
        if not self.is_settled:
            self.at_least, self.is_settled = [free - NOISE_NBYTES for free in self.free()], True


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    ray.init("local", num_cpus=8, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    try:
        training = Training(tmp_path_factory.mktemp("training"))
        yield training
        training.run.stop()
        training.run.result(60.0)
    finally:
        ray.shutdown()


@pytest.mark.parametrize("name", FAILURES)
def test_old_generation_goes_on_after(training: Training, name: str) -> None:
    who, fault, reason = FAILURES[name]
    resumed_s = fail(training.run, training.script, dict.fromkeys(who, fault), ONE, reason)
    waits = TIMEOUT_S if fault.action == "stall" else 0.0
    print(f"{name}: resumed after {resumed_s:.2f} s; {training.run.resizes[-1].error}")
    assert resumed_s < waits + ABORT_S
    training.wait_for_memory()


def test_then_resizes_succeed_and_a_leaving_rank_that_dies_is_recovered_from(training: Training) -> None:
    run, script = training.run, training.script
    assert run.resize(1).certified
    wait_for_step(run)
    assert fail(run, script, {(2, 1): Fault("round:3:packed", "kill")}, TWO, "died|TransportError") < ABORT_S
    assert run.resize(parallel=TWO).certified
    wait_for_step(run)
    dies = Fault("local:done", "kill")
    write_faults(script, {(2, 0): dies, (2, 1): dies})
    with pytest.raises(ResizeFailed):
        run.resize(parallel=ONE)
    wait_until(run, lambda: (run.status().generation or 0) > 2)
    wait_for_step(run)
    check_exact(finish(run, training.folder), died=1)
