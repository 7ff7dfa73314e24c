"""One Ray head for all trainer tests; each test adds the nodes it needs and takes them away."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 250,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
}


class Nodes:
    """Nodes of one test, by name of what happens to them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._nodes: list[Any] = []

    def add(self, slots: int) -> Any:
        node = self._cluster.add_node(num_cpus=slots, node_ip_address="127.0.0.1", object_store_memory=100 * 2**20)
        self._nodes.append(node)
        return node

    def kill(self, node: Any) -> None:
        """As when the machine loses its power."""
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def remove_all(self) -> None:
        for node in self._nodes:
            self._cluster.remove_node(node)
        self._nodes.clear()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "node_ip_address": "127.0.0.1",
            "include_dashboard": False,
            "object_store_memory": 100 * 2**20,
            "_system_config": HEALTH,
        },
    )
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[Nodes]:
    nodes = Nodes(cluster)
    yield nodes
    nodes.remove_all()
    deadline = time.monotonic() + 20
    while len([node for node in ray.nodes() if node["Alive"]]) > 1 and time.monotonic() < deadline:
        time.sleep(0.1)
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
