"""What the transport and shared memory do on real processes: right bytes, speed, abort, and a killed owner.

    python -m benchmarks.transport --ranks 2 --json benchmarks/results/transport_2ranks.json

With more ranks than GPUs each rank passes for a host of its own, and NCCL takes sockets between them. `--cpu` runs the
same over ETC_GLOO, with small sizes, to try the script. The exit status is 0 only if every check held.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_AUTH_MODE="disabled", RAY_memory_monitor_refresh_ms="0")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from benchmarks.provenance import provenance
from benchmarks.transport_ranks import MIB, Process, Rank
from ray_etc.actors.certificate import compare
from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import RankLayout, Shard, TensorSpec
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.plan import MigrationPlan

CALL_S = 120.0
SILENCE_S = 2.0


class Cluster:
    """The ranks, as Ray actors, and the calls to all of them."""

    def __init__(self, ranks: int, use_cpu: bool) -> None:
        self.use_cpu = use_cpu
        self.gpus = 0 if use_cpu else torch.cuda.device_count()
        ray.init(
            address="local",
            num_cpus=max(ranks, 4),
            num_gpus=self.gpus,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
        )
        own_host = self.gpus < ranks
        self.ranks = [
            self.actor(Rank, self.gpus / ranks, {"NCCL_HOSTID": f"rank{rank}"} if own_host else {})
            for rank in range(ranks)
        ]

    def actor(self, kind: type[Process], num_gpus: float, env: dict[str, str], strategy: Any = None) -> Any:
        path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
        env = {"PYTHONPATH": path, "NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", **env}
        options: dict[str, Any] = {"num_cpus": 0.5, "num_gpus": num_gpus, "runtime_env": {"env_vars": env}}
        if strategy is not None:
            options["scheduling_strategy"] = strategy
        return ray.remote(kind).options(max_concurrency=2, **options).remote(self.use_cpu)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return ray.get([getattr(rank, method).remote(*arguments) for rank in self.ranks], timeout=CALL_S)

    def group(self, name: str) -> float:
        """Make and connect a group; the longest that a member took to connect."""
        opened = ray.get(
            [rank.open.remote(name, index, len(self.ranks)) for index, rank in enumerate(self.ranks)], timeout=CALL_S
        )
        return max(self.call("connect", name, opened[0]))


def tensor_parallel(world: int, hidden: int) -> dict[int, RankLayout]:
    """A small made-up model, cut over `world` ranks along rows or columns."""
    specs = [
        (TensorSpec(kind, f"layer{layer}.{name}", shape, dtype, itemsize), dim)
        for layer in range(2)
        for name, shape, dim in (("qkv", (3 * hidden, hidden), 0), ("proj", (hidden, hidden), 1))
        for kind, dtype, itemsize in (("param", "bfloat16", 2), ("exp_avg", "float32", 4), ("steps", "int64", 8))
    ]

    def box(shape: tuple[int, ...], dim: int, rank: int) -> Box:
        offsets, lengths = [0, 0], list(shape)
        offsets[dim], lengths[dim] = shape[dim] // world * rank, shape[dim] // world
        return Box(tuple(offsets), tuple(lengths))

    return {rank: tuple(Shard(spec, box(spec.shape, dim, rank)) for spec, dim in specs) for rank in range(world)}


def measure_migration(cluster: Cluster, hidden: int) -> dict[str, Any]:
    """Half of the ranks to all of them and back: every byte by position, and the certificate."""
    world = len(cluster.ranks)
    results: dict[str, Any] = {}
    for old, new in ((world // 2, world), (world, world // 2)):
        source, target = tensor_parallel(old, hidden), tensor_parallel(new, hidden)
        plan: MigrationPlan = make_plan(source, target, dict.fromkeys(range(world), "node"), staging_nbytes=4 * MIB)
        plan.check()
        done = ray.get(
            [
                rank.migrate.remote("main", plan.for_rank(index), plan.source[index], plan.target[index])
                for index, rank in enumerate(cluster.ranks)
            ],
            timeout=CALL_S,
        )
        reports = [report for report, _ in done]
        compare(plan, reports)
        results[f"tp{old}_to_tp{new}"] = {
            "ok": all(good for _, good in done),
            "rounds": len(plan.rounds),
            "nbytes_wire": plan.nbytes_wire,
            "nbytes_local": plan.nbytes_local,
            **{
                f"{name}_s": max(getattr(report, f"{name}_s") for report in reports)
                for name in ("local", "wire", "certify")
            },
        }
    return results


def measure_speed(cluster: Cluster, large_nbytes: int, counts: list[tuple[int, int]]) -> dict[str, Any]:
    """GB/s each way between partners, the slowest pair, all pairs at once."""
    results: dict[str, Any] = {"large_nbytes": large_nbytes}
    results["large_message_gb_per_s"] = min(cluster.call("large_message", "main", large_nbytes))
    for count, nbytes in counts:
        results[f"{count}_slices_of_{nbytes}"] = {
            "packed_gb_per_s": min(cluster.call("slices", "main", count, nbytes, True)),
            "one_message_a_slice_gb_per_s": min(cluster.call("slices", "main", count, nbytes, False)),
        }
    return results


def measure_abort(cluster: Cluster) -> dict[str, Any]:
    """A silent peer, an abort from another thread, a killed peer; then a new group of those that are left."""
    first, last = cluster.ranks[0], cluster.ranks[-1]
    results: dict[str, Any] = {}
    cluster.group("silent")
    results["silent_peer"] = ray.get(first.wait_for_silent.remote("silent", SILENCE_S), timeout=CALL_S)
    cluster.call("close", "silent")
    cluster.group("aborted")
    results["abort_after_1_s"] = ray.get(first.wait_for_silent.remote("aborted", 60.0, 1.0), timeout=CALL_S)
    cluster.call("close", "aborted")
    results["new_group_connect_s"] = cluster.group("again")
    results["new_group_gb_per_s"] = min(cluster.call("large_message", "again", MIB))
    waiting = first.wait_for_silent.remote("again", 10.0)
    os.kill(ray.get(last.pid.remote(), timeout=CALL_S), signal.SIGKILL)
    results["killed_peer"] = ray.get(waiting, timeout=CALL_S)
    results["ok"] = (
        results["silent_peer"]["error"].startswith("TransportTimeout")
        and results["silent_peer"]["seconds"] < SILENCE_S + 2.0
        and "aborted" in results["abort_after_1_s"]["error"]
        and results["abort_after_1_s"]["seconds"] < 3.0
        and results["killed_peer"]["error"].startswith("Transport")
        and all(results[case]["device_usable"] for case in ("silent_peer", "abort_after_1_s", "killed_peer"))
    )
    return results


def measure_sharing(cluster: Cluster, nbytes: int, count: int) -> dict[str, Any]:
    """Two processes on one GPU: map the one's memory in the other, then kill the one."""
    bundle = {"CPU": 1.0} if cluster.use_cpu else {"CPU": 1.0, "GPU": 1.0}
    slot = placement_group([bundle])
    ray.get(slot.ready(), timeout=CALL_S)
    share_of_gpu = 0.0 if cluster.use_cpu else 0.5
    owner, reader = (
        cluster.actor(Process, share_of_gpu, {}, PlacementGroupSchedulingStrategy(slot, 0)) for _ in range(2)
    )
    names = _shared_names()
    shared = ray.get(owner.fill.remote(nbytes, count), timeout=CALL_S)
    results: dict[str, Any] = {"nbytes": nbytes, "views": count, "storages": len(shared.storages)}
    results["map_s"] = ray.get(reader.map.remote(shared), timeout=CALL_S)
    results["copy_out"] = ray.get(reader.copy_out.remote(), timeout=CALL_S)
    sums = ray.get(owner.sums.remote(), timeout=CALL_S)
    same = ray.get(reader.sums.remote(), timeout=CALL_S) == sums
    os.kill(ray.get(owner.pid.remote(), timeout=CALL_S), signal.SIGKILL)
    try:
        ray.get(owner.sums.remote(), timeout=CALL_S)
    except ray.exceptions.RayActorError:
        results["owner"] = "killed"
    results["same_after_owner_killed"] = ray.get(reader.sums.remote(), timeout=CALL_S) == sums
    ray.get(reader.unmap.remote(), timeout=CALL_S)
    results["left_in_dev_shm"] = sorted(_shared_names() - names)
    results["ok"] = same and results["copy_out"]["same"] and results["same_after_owner_killed"]
    ray.kill(reader)
    remove_placement_group(slot)
    return results


def _shared_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "torch" in name or "cuda" in name}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="an even number")
    parser.add_argument("--cpu", action="store_true", help="ETC_GLOO and small sizes")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    if not arguments.cpu and not torch.cuda.is_available():
        parser.error("no GPU here: use --cpu")
    if arguments.ranks < 2 or arguments.ranks % 2:
        parser.error(f"--ranks {arguments.ranks}: the ranks exchange in pairs, so give an even number")
    result: dict[str, Any] = provenance("benchmarks.transport")
    cluster = Cluster(arguments.ranks, arguments.cpu)
    try:
        result["ranks"], result["gpus"] = arguments.ranks, cluster.gpus
        fast = not arguments.cpu and cluster.gpus >= arguments.ranks
        result["connect_s"] = cluster.group("main")
        result["migration"] = measure_migration(cluster, 64 if arguments.cpu else 1024)
        counts = [(1024, MIB), (4096, 16 << 10)] if fast else [(64, 64 << 10), (256, 4 << 10)]
        result["speed"] = measure_speed(cluster, (1024 if fast else 64) * MIB, counts)
        result["abort"] = measure_abort(cluster)
        for rank in cluster.ranks:
            ray.kill(rank)
        result["sharing"] = measure_sharing(cluster, (16 if arguments.cpu else 4096) * MIB, 64)
    finally:
        ray.shutdown()
    result["ok"] = (
        all(each["ok"] for each in result["migration"].values()) and result["abort"]["ok"] and result["sharing"]["ok"]
    )
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
