"""What the next generation's start costs the training, and what having started before saves.

    python -m benchmarks.shadow --cpu --json benchmarks/results/shadow-2-cores.json

Three parts. Processes that import torch and Megatron-core beside two ranks that train: the ranks' step time, against
that just before. A rank that is killed, in plain data parallelism: how long nobody trains, from the last whole step to
the first new one, with standbys and without. Resizes: the first step after them, with the warm-up step and without.
Each pair is measured in one run, and what varies, in turns. With GPUs there is one rank on each of two.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.processes import Process, call_all
from benchmarks.provenance import provenance
from benchmarks.shadow_training import Trainer, train
from ray_etc.demo.options import set_environment

RANKS = 2
ALONE_S = 4.0
STARTS = {
    "all at once": ("import_all", True),
    "one after the other": ("import_all", False),
    "one after the other, in the background": ("import_all_in_background", False),
}
"""The function of `ray_etc.actors.imports` that imports Megatron-core, and whether all processes start at once.

The last is what standbys do. Ray's worker and torch come first in each, as they are imported before a rank's first
call."""
START = """
import json, sys
import ray_etc.actors.rank
from ray_etc.actors import imports
getattr(imports, sys.argv[1])(json.loads(sys.argv[2]))
"""


def imports_beside_training(use_gpu: bool, repeats: int, limit_s: float) -> list[dict[str, Any]]:
    told = "import json, sys, ray_etc.actors.rank, ray_etc.megatron; print(json.dumps(list(sys.modules)))"
    modules = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout
    cases = []
    with TemporaryDirectory() as folder:
        ranks = [Process(Trainer, rank, RANKS, f"{folder}/store", use_gpu) for rank in range(RANKS)]
        try:
            call_all(ranks, "start")
            for _ in range(repeats):
                for name, (function, at_once) in STARTS.items():
                    call_all(ranks, "take_step_times")
                    time.sleep(ALONE_S)
                    alone = call_all(ranks, "take_step_times")[0]
                    started = time.monotonic()
                    is_over = _start(function, at_once, modules, limit_s)
                    start_s = time.monotonic() - started
                    beside = call_all(ranks, "take_step_times")[0]
                    alone_s, beside_s = statistics.mean(alone), statistics.mean(beside)
                    case = {
                        "start": name,
                        "alone_step_s": alone_s,
                        "beside_step_s": beside_s,
                        "shadow_slowdown": beside_s / alone_s - 1,
                        "start_s": start_s,
                        "is_over": is_over,
                        "lost_s": start_s * (1 - alone_s / beside_s),
                    }
                    print(json.dumps(case), flush=True)
                    cases.append(case)
            call_all(ranks, "stop")
        finally:
            for rank in ranks:
                rank.end()
    return cases


def _start(function: str, at_once: bool, modules: str, limit_s: float) -> bool:
    """Start one process a rank; whether all were through within the limit."""
    command = [sys.executable, "-W", "ignore", "-c", START, function, modules]
    deadline = time.monotonic() + limit_s
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(RANKS):
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            if not at_once:
                running[-1].wait(max(deadline - time.monotonic(), 0.1))
        for process in running:
            if process.wait(max(deadline - time.monotonic(), 0.1)):
                raise RuntimeError(f"a process that imports ended with status {process.returncode}")
    except subprocess.TimeoutExpired:
        return False
    finally:
        for process in running:
            process.kill()
            process.wait()
    return True


@contextmanager
def _cluster(use_gpu: bool) -> Iterator[None]:
    set_environment()
    import ray
    from ray.cluster_utils import Cluster

    node = {"node_ip_address": "127.0.0.1", "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0, **node})
    try:
        cluster.add_node(num_cpus=RANKS, num_gpus=RANKS if use_gpu else 0, node_ip_address="127.0.0.1")
        ray.init(address=cluster.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def _run(use_gpu: bool, is_zero: bool, warm_standbys: bool, **config: Any) -> Any:
    import ray

    from ray_etc import ElasticTrainer, ParallelConfig

    run = ElasticTrainer(
        train,
        train_loop_config=config,
        parallel=ParallelConfig(distributed_optimizer=is_zero),
        scaling_config=ray.train.ScalingConfig(num_workers=(1, RANKS), use_gpu=use_gpu),
        warm_standbys=warm_standbys,
        timeout_s=120.0,
        start_timeout_s=600.0,
    ).start()
    _await(run, partial(_has_step, run, 3))
    return run


def _await(run: Any, condition: Callable[[], bool], timeout_s: float = 600.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline or run.status().activity == "ended":
            raise TimeoutError(f"waited in vain: {run.status()}")
        time.sleep(0.05)


def _has_step(run: Any, step: int) -> bool:
    return run.status().step >= step


def _has_standbys(run: Any) -> bool:
    return run.status().standbys_warm == RANKS


def _is_measured(run: Any) -> bool:
    return bool(run.resizes) and run.resizes[0].pause_s is not None


def recoveries(use_gpu: bool) -> list[dict[str, Any]]:
    """A rank is killed while two train; with standbys once both are warm."""
    cases = []
    for warm in (False, True):
        run = _run(use_gpu, False, warm)
        if warm:
            _await(run, partial(_has_standbys, run))
        victim = run.reports[0][1][0]["pid"]
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        _await(run, partial(_is_measured, run))
        record = run.resizes[0]
        case = {
            "standbys": warm,
            "from_last_step_s": record.pause_s,
            "from_kill_s": record.paused_at + record.pause_s - killed,
            "phases_s": record.phases,
            "error": record.error,
        }
        print(json.dumps(case), flush=True)
        cases.append(case)
        run.stop()
        run.result(60.0)
    return cases


def first_steps(use_gpu: bool, resizes: int) -> list[dict[str, Any]]:
    """Resizes to and fro; generations with an odd number do the warm-up step."""
    from ray_etc import ParallelConfig

    run = _run(use_gpu, True, False, is_warmed_up="odd")
    cases = []
    for generation in range(1, resizes + 1):
        zero = generation % 2 == 0
        record = run.resize(parallel=ParallelConfig(data_parallel=RANKS, distributed_optimizer=zero), timeout_s=600.0)
        _await(run, partial(_has_step, run, record.next_step + 6))
        first, *others = [run.reports[step] for step in range(record.next_step, record.next_step + 6)]
        case: dict[str, Any] = {"warmed_up": not zero, "pause_s": record.pause_s, "prepare_s": record.phases["prepare"]}
        for name in ("step_s", "cpu_s"):
            case[f"first_{name}"] = max(metrics[name] for [metrics] in first.values())
            case[f"usual_{name}"] = statistics.median(m[name] for ranks in others for [m] in ranks.values())
        print(json.dumps(case), flush=True)
        cases.append(case)
    run.stop()
    run.result(60.0)
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="two ranks on the processors")
    parser.add_argument("--only", default="", help="of the parts imports, recoveries, first_steps")
    parser.add_argument("--repeats", type=int, default=3, help="of each way to start")
    parser.add_argument("--limit-s", type=float, default=60.0, help="to wait for processes to have started")
    parser.add_argument("--resizes", type=int, default=6)
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    use_gpu = not arguments.cpu
    result: dict[str, Any] = provenance("benchmarks.shadow")
    if arguments.only in "imports":
        result["imports"] = imports_beside_training(use_gpu, arguments.repeats, arguments.limit_s)
    with _cluster(use_gpu):
        if arguments.only in "recoveries":
            result["recoveries"] = recoveries(use_gpu)
            cold, warm = (each["from_kill_s"] for each in result["recoveries"])
            result["cold_over_warm"] = cold / warm
            print(json.dumps({"cold_over_warm": cold / warm}), flush=True)
        if arguments.only in "first_steps":
            result["first_steps"] = first_steps(use_gpu, arguments.resizes)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
