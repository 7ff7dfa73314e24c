"""What the shadow of real Megatron ranks costs the training: the 1.35B GPT of `benchmarks.end_to_end`, on its own GPUs.

    python -m benchmarks.shadow_ranks --json benchmarks/results/handover-shadow-of-ranks-1xH200.json

On a host with GPUs: one rank on each, data parallel. Again and again the run moves into new processes under the
configuration that it has, first without standbys, then with them. No node comes or goes, so nothing is counted that on
a cluster would happen on other machines. Of each generation: steps beside a standby that imports, steps beside nothing,
which are what the others are compared with, and steps beside the preparation of the next generation, by its stages.
Eight samples go through the model at once: with two, the processor that launches the kernels decides what a step takes,
and on a host that others share it varies by more than the shadow costs.
`--cpu` trains a tiny model over gloo, to try the script. The exit status is 0 only if every resize was certified.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.end_to_end import LARGE, TINY
from benchmarks.end_to_end_figures import SETTLING_STEPS, Step, of_all_ranks, shadow
from benchmarks.provenance import provenance
from ray_etc.demo.options import set_environment

WAIT_S = 150.0


@contextmanager
def _cluster(slots: int, use_gpu: bool) -> Iterator[None]:
    import ray
    from ray.cluster_utils import Cluster

    logging.getLogger("ray").setLevel(logging.ERROR)
    node = {"num_cpus": 2 * slots, "num_gpus": slots if use_gpu else 0, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def measure(
    config: dict[str, Any], slots: int, use_gpu: bool, warm_standbys: bool, resizes: int, alone: int
) -> list[dict[str, Any]]:
    """The figures of each resize, `alone` steps after the one before has settled and standbys are warm."""
    from ray.train import ScalingConfig

    from benchmarks.end_to_end_training import train
    from ray_etc import ElasticTrainer, ParallelConfig

    parallel = ParallelConfig(data_parallel=slots)
    resources = {"CPU": 2.0} | ({"GPU": 1.0} if use_gpu else {})
    run = ElasticTrainer(
        train,
        train_loop_config=config,
        parallel=parallel,
        warm_standbys=warm_standbys,
        scaling_config=ScalingConfig(num_workers=slots, use_gpu=use_gpu, resources_per_worker=resources),
    ).start()
    cases, first_step, settled_at = [], 0, 0.0
    try:
        for _ in range(resizes):
            _await_step(run, first_step + SETTLING_STEPS)
            settled_at = time.time()
            if warm_standbys:
                _await(run, lambda: run.status().standbys_warm == slots, "standbys")
            warm_at = time.time()
            _await_step(run, run.status().step + alone)
            caused_at = time.time()
            record = run.resize(parallel=parallel, timeout_s=WAIT_S)
            steps = _steps(run, first_step, record.next_step or 0)
            beside = [step for step in steps if step.started_at > caused_at]
            importing = [step for step in steps if settled_at < step.started_at and step.ended_at < warm_at]
            compared = [step for step in steps if warm_at < step.started_at and step.ended_at < caused_at]
            case = {
                "standbys": warm_standbys,
                "pause_s": record.pause_s,
                "phases": record.phases,
                "certified": record.certified,
                **shadow(
                    compared, importing + beside, {"standby": settled_at, "ask": caused_at, **record.phases_began_at}
                ),
            }
            print(json.dumps({name: value for name, value in case.items() if "steps_" not in name}), flush=True)
            cases.append(case)
            first_step = record.next_step or 0
    finally:
        run.stop()
        run.result(60.0)
    return cases


def _steps(run: Any, first: int, until: int) -> list[Step]:
    return [
        of_all_ranks(metrics["step"] for [metrics] in run.reports[number].values()) for number in range(first, until)
    ]


def _await_step(run: Any, number: int) -> None:
    _await(run, lambda: run.status().step >= number, f"step {number}")


def _await(run: Any, condition: Any, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if run.status().activity == "ended":
            run.result(10.0)
            raise RuntimeError(f"the run ended before {what}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {WAIT_S:.0f} s for {what}: {run.status()}")
        time.sleep(0.02)


def summarize(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all resizes of a kind together: what their shadows cost, over the time they took."""
    lost = sum(sum(case["shadow_lost_s"].values()) for case in cases)
    beside = sum(case["shadow_s"] for case in cases)
    return {
        "shadow_slowdown": lost / (beside - lost),
        "shadow_lost_s": lost / len(cases),
        "shadow_s": beside / len(cases),
        "prepare_s": statistics.median(case["phases"]["prepare"] for case in cases),
        "pause_s": statistics.median(case["pause_s"] for case in cases),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="gloo and a tiny model, two ranks")
    parser.add_argument("--resizes", type=int, default=3, help="of each kind")
    parser.add_argument("--alone", type=int, default=30, help="steps to compare with, before each resize")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="samples in one forward pass; a rank trains 8")
    parser.add_argument("--only", choices=("cold", "standbys"), help="one kind")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    set_environment()
    slots = 2 if arguments.cpu else _gpu_count()
    batch = {"global_batch_size": 8 * slots, "micro_batch_size": arguments.micro_batch_size}
    config = (TINY if arguments.cpu else LARGE) | batch
    result: dict[str, Any] = provenance("benchmarks.shadow_ranks") | {"config": config, "slots": slots}
    with _cluster(slots, not arguments.cpu):
        for kind, warm in (("cold", False), ("standbys", True)):
            if arguments.only in (None, kind):
                cases = measure(config, slots, not arguments.cpu, warm, arguments.resizes, arguments.alone)
                result[kind] = summarize(cases) | {"resizes": cases}
                print(json.dumps({kind: summarize(cases)}), flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    resizes = [case for kind in ("cold", "standbys") for case in result.get(kind, {"resizes": []})["resizes"]]
    return 0 if all(case["certified"] for case in resizes) else 1


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
