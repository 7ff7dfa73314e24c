"""The elastic part of `benchmarks.end_to_end`: a run on a Ray cluster whose second node comes and goes."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.train import RunConfig, ScalingConfig

from benchmarks.end_to_end_figures import SETTLING_STEPS, Step, back_to_normal, of_all_ranks, shadow
from benchmarks.end_to_end_training import train
from ray_etc import ElasticCallback, ElasticRun, ElasticTrainer, ParallelConfig, ResizeRecord, drain_node

STEPS_BETWEEN = 3 * SETTLING_STEPS
"""After each resize: some to settle, the rest to say what is normal."""
LOSS_STEPS = 5
WAIT_S = 150.0
DRAIN_S = 120.0
SAME_LOSS = 0.5
"""Between the steps before a resize and those after it; what is lost or mixed up shows as several."""


@dataclass(frozen=True)
class Event:
    """A node joins or drains, and training goes on under `parallel`."""

    name: str
    parallel: ParallelConfig
    joins: bool


EVENTS = (
    Event("tp1_to_tp2", ParallelConfig(tensor_parallel=2), joins=True),
    Event("tp2_to_tp1", ParallelConfig(), joins=False),
    Event("dp1_to_dp2", ParallelConfig(data_parallel=2), joins=True),
    Event("dp2_to_dp1", ParallelConfig(), joins=False),
)


class Nodes:
    """A Ray cluster on loopback: a head without slots, and nodes of one slot each."""

    def __init__(self, use_cpu: bool) -> None:
        self._use_cpu = use_cpu
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "num_gpus": 0, "node_ip_address": "127.0.0.1", "include_dashboard": False},
        )
        self.address: str = self._cluster.address

    def add(self, gpu: int) -> Any:
        resources: dict[str, Any] = {"num_cpus": 2, "num_gpus": 0}
        if not self._use_cpu:
            resources |= {"num_gpus": 1, "env_vars": {"CUDA_VISIBLE_DEVICES": str(gpu)}}
        return self._cluster.add_node(
            node_ip_address="127.0.0.1", object_store_memory=100 * 2**20, wait=True, **resources
        )

    def remove(self, node: Any) -> None:
        self._cluster.remove_node(node)

    def close(self) -> None:
        self._cluster.shutdown()


@dataclass
class Story(ElasticCallback):
    """Causes one resize after another, and keeps when each was caused and when it began."""

    nodes: Nodes
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    began_at: dict[int, float] = field(default_factory=dict)
    caused_at: list[float] = field(default_factory=list)
    joined: Any = None

    def choose(self, number: int) -> ParallelConfig:
        if number != self.parallel.world_size:
            raise ValueError(f"{number} ranks are not those of {self.parallel}")
        return self.parallel

    def before_resize(self, record: ResizeRecord) -> None:
        self.began_at[record.generation] = time.time()

    def cause(self, event: Event) -> None:
        self.parallel = event.parallel
        self.caused_at.append(time.time())
        if event.joins:
            self.joined = self.nodes.add(1)
        else:
            drain_node(self.joined.node_id, DRAIN_S, "the benchmark's spot notice")

    def settle(self, event: Event) -> None:
        """After the resize and its steps: a node that was drained is taken away."""
        if not event.joins:
            self.nodes.remove(self.joined)


def measure_elastic(config: dict[str, Any], use_cpu: bool, keep: Callable[[Any], None]) -> dict[str, Any]:
    """Train on one slot, on two, and so on; `keep` is given what is known after each resize."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    nodes = Nodes(use_cpu)
    result: dict[str, Any] = {}
    try:
        nodes.add(0)
        ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
        story = Story(nodes)
        run = _trainer(config, use_cpu, story).start()
        try:
            _await(run, lambda: run.status().step >= STEPS_BETWEEN, "the first steps")
            for event in EVENTS:
                print(event.name, flush=True)
                story.cause(event)
                _await_steps_after_resize(run, len(story.caused_at), event.name)
                story.settle(event)
                result = summarize(run, story)
                keep(result)
        finally:
            run.stop()
            run.result(60.0)
    finally:
        ray.shutdown()
        nodes.close()
    return result


def _trainer(config: dict[str, Any], use_cpu: bool, story: Story) -> ElasticTrainer:
    return ElasticTrainer(
        train,
        train_loop_config=config,
        parallel=story.choose,
        scaling_config=ScalingConfig(
            num_workers=(1, 2),
            use_gpu=not use_cpu,
            resources_per_worker={"CPU": 2} if use_cpu else {"CPU": 2, "GPU": 1},
        ),
        run_config=RunConfig(name="ray_etc_end_to_end", callbacks=[story]),
    )


def _done(run: ElasticRun) -> list[ResizeRecord]:
    return [record for record in run.resizes if record.pause_s is not None]


def _await_steps_after_resize(run: ElasticRun, number: int, what: str) -> None:
    _await(run, lambda: len(_done(run)) == number, what)
    goal = (_done(run)[-1].next_step or 0) + STEPS_BETWEEN
    _await(run, lambda: run.status().step >= goal, f"the steps after {what}")


def _await(run: ElasticRun, condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if run.status().activity == "ended":
            run.result(10.0)
            raise RuntimeError(f"the run ended before {what}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {WAIT_S:.0f} s for {what}: {run.status()}, {run.resizes}")
        time.sleep(0.02)


def summarize(run: ElasticRun, story: Story) -> dict[str, Any]:
    """Each resize so far with the steps around it, and every step."""
    steps = {
        number: of_all_ranks(metrics["step"] for [metrics] in list(by_rank.values()))
        for number, by_rank in sorted(run.reports.items())
    }
    done = _done(run)
    starts = [0, *(record.next_step or 0 for record in done), max(steps) + 1]
    generations = [[steps[number] for number in range(*edges)] for edges in pairwise(starts)]
    resizes = [
        resize_figures(event, record, generations[index], generations[index + 1], story, index)
        for index, (event, record) in enumerate(zip(EVENTS, done, strict=False))
    ]
    return {
        "resizes": resizes,
        "given_up": [record.to_dict() for record in run.resizes if record.error],
        "generations_from_step": starts[:-1],
        "loss": [round(step.loss, 5) for step in steps.values()],
        "step_s": [round(step.seconds, 5) for step in steps.values()],
        "is_right": all(each["certified"] and each["loss_goes_on"] for each in resizes),
    }


def resize_figures(
    event: Event, record: ResizeRecord, old: list[Step], new: list[Step], story: Story, index: int
) -> dict[str, Any]:
    began_at, caused_at = story.began_at[record.generation], story.caused_at[index]
    undisturbed = [step for step in old if step.ended_at < caused_at]
    beside = [step for step in old if step.started_at > began_at]
    next_at = story.caused_at[index + 1] if index + 1 < len(story.caused_at) else float("inf")
    paused_at = record.paused_at or 0.0
    loss_before = statistics.mean(step.loss for step in old[-LOSS_STEPS:])
    loss_after = statistics.mean(step.loss for step in new[:LOSS_STEPS])
    return {
        "resize": event.name,
        **record.to_dict(),
        **shadow(undisturbed[SETTLING_STEPS:], beside, record.phases_began_at),
        **back_to_normal([step for step in new if step.ended_at < next_at], paused_at),
        "caused_to_paused_s": paused_at - caused_at,
        "loss_before": loss_before,
        "loss_after": loss_after,
        "loss_goes_on": abs(loss_after - loss_before) < SAME_LOSS,
    }
