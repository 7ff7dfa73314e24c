"""A Ray cluster of several nodes on loopback, for the demo."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SLOTS_PER_NODE = 2


class DemoCluster:
    """A head without slots, and nodes of two slots each."""

    def __init__(self, gpu_count: int) -> None:
        from ray.cluster_utils import Cluster

        self._gpu_count = gpu_count
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "num_gpus": 0, "node_ip_address": "127.0.0.1", "include_dashboard": False},
        )
        self._nodes = 0

    @property
    def address(self) -> str:
        return self._cluster.address

    def add_node(self) -> str:
        """Returns the node's id. With GPUs, each node takes the next one, round and round."""
        resources: dict[str, Any] = {"num_cpus": SLOTS_PER_NODE, "num_gpus": 0}
        if self._gpu_count:
            gpu = str(self._nodes % self._gpu_count)
            resources.update(num_gpus=1, env_vars={"CUDA_VISIBLE_DEVICES": gpu})
        self._nodes += 1
        node = self._cluster.add_node(
            node_ip_address="127.0.0.1", object_store_memory=100 * 2**20, wait=True, **resources
        )
        return node.node_id

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def demo_cluster(gpu_count: int) -> Iterator[DemoCluster]:
    """A cluster of one node with slots, and this process connected to it."""
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    cluster = DemoCluster(gpu_count)
    try:
        cluster.add_node()
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield cluster
    finally:
        ray.shutdown()
        cluster.close()
