"""One Ray head for all trainer tests; each test adds the nodes that it needs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.state import available_resources_per_node
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
from runs import rank_processes

from ray_etc.actors.ray_internals import draining_nodes

HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 250,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
}


class Nodes:
    """Nodes of one test, by name of what happens to them.

    Those that nothing happened to are kept for the next test, where it wants the same: to start one costs more than
    most tests. No other node is there from the first `add` of a test on.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._slots: dict[Any, int] = {}
        self._kept: list[Any] = []

    def add(self, slots: int) -> Any:
        node = next((kept for kept in self._kept if self._slots[kept] == slots), None)
        if node is not None:
            self._kept.remove(node)
        self._remove_kept()
        if node is None:
            node = self._cluster.add_node(num_cpus=slots, node_ip_address="127.0.0.1", object_store_memory=100 * 2**20)
            self._slots[node] = slots
        return node

    def kill(self, node: Any) -> None:
        """As when the machine loses its power."""
        del self._slots[node]
        self._cluster.remove_node(node, allow_graceful=False)

    def end_test(self) -> None:
        """Once all that ran there has ended keep the nodes that are as new, and remove the others."""
        _wait_until(lambda: not rank_processes() and not _groups() and self._free() == self._staying(), 20.0)
        self._kept = [] if rank_processes() or _groups() else self._free()
        for node in self._slots.keys() - set(self._kept):
            self._remove(node)

    def remove_all(self) -> None:
        for node in list(self._slots):
            self._remove(node)

    def _remove_kept(self) -> None:
        for node in self._kept:
            self._remove(node)
        self._kept = []

    def _remove(self, node: Any) -> None:
        del self._slots[node]
        self._cluster.remove_node(node)
        _wait_until(lambda: node.node_id not in {each["NodeID"] for each in ray.nodes() if each["Alive"]}, 20.0)

    def _staying(self) -> list[Any]:
        """Nodes that live and are not to go."""
        living, draining = available_resources_per_node().keys(), draining_nodes()
        return [node for node in self._slots if node.node_id in living and node.node_id not in draining]

    def _free(self) -> list[Any]:
        """Those of them of which nothing is taken."""
        available = available_resources_per_node()
        return [n for n in self._staying() if available.get(n.node_id, {}).get("CPU") == self._slots[n]]


def _groups() -> list[str]:
    """Placement groups that are there, or wanted."""
    return [name for name, group in placement_group_table().items() if group["state"] != "REMOVED"]


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "node_ip_address": "127.0.0.1",
            "include_dashboard": False,
            "include_log_monitor": False,
            "no_monitor": True,  # no autoscaler
            "object_store_memory": 100 * 2**20,
            "_system_config": HEALTH,
        },
    )
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def all_nodes(cluster: Cluster) -> Iterator[Nodes]:
    nodes = Nodes(cluster)
    yield nodes
    nodes.remove_all()


@pytest.fixture
def nodes(all_nodes: Nodes) -> Iterator[Nodes]:
    yield all_nodes
    all_nodes.end_test()
    for pid in _orphaned_workers():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _orphaned_workers() -> list[int]:
    """Workers of a raylet that was killed: Ray leaves them behind. Only those that were this process's own."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                process = Path("/proc", entry)
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == 1 and b"ray::Rank" in (process / "cmdline").read_bytes():
                    found.append(int(entry))
    return found
