"""The demo's story: a node joins, the configuration is changed, a node is drained; then the loss is compared."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ray_etc.demo.options import DemoOptions, set_environment
from ray_etc.demo.view import View, losses_of

MODEL = {
    "num_layers": 4,
    "hidden_size": 128,
    "ffn_hidden_size": 352,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "vocab_size": 256,
    "sequence_length": 64,
}
OPTIMIZER = {"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 10, "clip_grad": 1.0}
RESIZES = 3
DRAIN_DEADLINE_S = 60.0
LOSS_TOLERANCE = 5e-4
"""fp32 sums in another order after a resize; a wrong transfer of any kind of state shows far above it."""


@dataclass
class Story:
    """What happens to the running training, in order; `tick` moves on when the training has got there."""

    run: Any
    cluster: Any
    say: Callable[[str], None]
    chapter: int = 0
    next_step: int = 5
    joined_node: str | None = None
    failure: str | None = None
    asking: threading.Thread | None = field(default=None, repr=False)

    def tick(self) -> None:
        done = [record for record in self.run.resizes if record.pause_s is not None]
        failed = [record for record in self.run.resizes if record.error]
        if failed:
            self.failure = failed[0].error
        if self.chapter > len(done) or self.run.status().step < self.next_step:
            return
        if self.chapter == 0:
            self.say("a node joins")
            self.joined_node = self.cluster.add_node()
        elif self.chapter == 1:
            self.say("asked for TP1 PP2 DP2 at the same size")
            self.asking = threading.Thread(target=self._ask, daemon=True)
            self.asking.start()
        elif self.chapter == 2:
            from ray_etc import drain_node

            self.say(f"the node that joined will be taken away in {DRAIN_DEADLINE_S:.0f} s")
            assert self.joined_node is not None
            drain_node(self.joined_node, DRAIN_DEADLINE_S, "the demo's spot notice")
        else:
            return
        self.chapter += 1
        self.next_step = self.run.status().step + 3

    def _ask(self) -> None:
        from ray_etc import ParallelConfig

        try:
            self.run.resize(parallel=ParallelConfig(pipeline_parallel=2, data_parallel=2))
        except Exception as error:
            self.failure = str(error)


def run_demo(options: DemoOptions) -> int:
    """Play the story. Returns the exit status: 0 only if every certificate held and the losses agree."""
    set_environment()
    from ray_etc.demo.cluster import demo_cluster

    gpu_count = _gpu_count() if options.gpus else 0
    with demo_cluster(gpu_count) as cluster, View(options.steps) as view:
        view.say("training with 2 ranks, TP2")
        run = _trainer(options, gpu_count, (2, 4), "elastic").start()
        story = Story(run, cluster, view.say)
        with _stopping(run):
            while run.status().activity != "ended":
                story.tick()
                view.show(run)
                time.sleep(0.1)
        elastic = run.result()
        view.show(run)
        view.say("the same again with 2 ranks and no resize, to compare")
        unbroken_run = _trainer(options, gpu_count, 2, "unbroken").start()
        with _stopping(unbroken_run):
            while unbroken_run.status().activity != "ended":
                view.show_unbroken(unbroken_run)
                time.sleep(0.1)
        summary = summarize(options, elastic, unbroken_run.result())
        problems = find_problems(summary, story.failure)
        view.conclude(summary, problems, LOSS_TOLERANCE)
    if options.json is not None:
        options.json.write_text(json.dumps(summary, indent=1))
    return 1 if problems else 0


@contextmanager
def _stopping(run: Any) -> Iterator[None]:
    """Ends the run before the cluster under it, where the user interrupts the demo."""
    try:
        yield
    except BaseException:
        run.stop()
        with suppress(Exception):
            run.result(10.0)
        raise


def _gpu_count() -> int:
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise SystemExit("--gpus: torch finds no GPU on this machine; leave the option out to train on CPUs")
    return count


def _trainer(options: DemoOptions, gpu_count: int, workers: int | tuple[int, int], name: str) -> Any:
    from ray.train import RunConfig, ScalingConfig

    from ray_etc import ElasticTrainer, ParallelConfig
    from ray_etc.demo.training import train

    return ElasticTrainer(
        train,
        train_loop_config={
            "model": MODEL,
            "optimizer": {**OPTIMIZER, "decay_steps": options.steps},
            "data": str(options.data) if options.data else None,
            "steps": options.steps,
            "seed": options.seed,
            "resizes": RESIZES if isinstance(workers, tuple) else 0,
        },
        parallel=ParallelConfig(tensor_parallel=2),
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=bool(gpu_count),
            resources_per_worker={"CPU": 1, "GPU": 0.5} if gpu_count else {"CPU": 1},
        ),
        run_config=RunConfig(name=f"ray_etc_demo_{name}"),
    )


def summarize(options: DemoOptions, elastic: Any, unbroken: Any) -> dict[str, Any]:
    """The result as data, as `--json` writes it."""
    loss, loss_unbroken = losses_of(elastic.reports), losses_of(unbroken.reports)
    return {
        "steps": options.steps,
        "loss": loss,
        "loss_unbroken": loss_unbroken,
        "loss_max_abs_difference": max(
            (abs(a - b) for a, b in zip(loss, loss_unbroken, strict=False)), default=float("inf")
        ),
        "samples_in_order": samples_in_order(elastic.reports, options.steps),
        "resizes": [record.to_dict() for record in elastic.resizes],
    }


def samples_in_order(reports: dict[int, dict[int, list[dict[str, Any]]]], steps: int) -> bool:
    """Whether each step trained on exactly the samples that are its own, each once."""
    from ray_etc.demo.training import GLOBAL_BATCH_SIZE

    if sorted(reports) != list(range(steps)):
        return False
    for step, by_rank in reports.items():
        by_replica: dict[int, set[tuple[int, ...]]] = {}
        for [metrics] in by_rank.values():
            by_replica.setdefault(metrics["coordinate"][1], set()).add(tuple(metrics["sample_ids"]))
        if any(len(versions) != 1 for versions in by_replica.values()):
            return False
        seen = sorted(sample for [ids] in by_replica.values() for sample in ids)
        if seen != list(range(step * GLOBAL_BATCH_SIZE, (step + 1) * GLOBAL_BATCH_SIZE)):
            return False
    return True


def find_problems(summary: dict[str, Any], failure: str | None) -> list[str]:
    """Why the demo did not show what it is for; empty where it did."""
    problems = [failure] if failure else []
    certified = sum(record["certified"] for record in summary["resizes"])
    if certified < RESIZES or certified < len(summary["resizes"]):
        problems.append(
            f"{certified} of {max(RESIZES, len(summary['resizes']))} resizes were carried out and certified"
        )
    if not summary["samples_in_order"]:
        problems.append("samples were lost, repeated or reordered")
    if not len(summary["loss"]) == len(summary["loss_unbroken"]) == summary["steps"]:
        problems.append(
            f"{len(summary['loss'])} and {len(summary['loss_unbroken'])} of {summary['steps']} steps were trained"
        )
    if not summary["loss_max_abs_difference"] <= LOSS_TOLERANCE:
        problems.append(f"losses differ by {summary['loss_max_abs_difference']:.2g}, more than {LOSS_TOLERANCE:.0e}")
    return problems
