"""What Ray says about its nodes, as events: draining with a deadline, died. That one joined, a placed slot tells."""

from __future__ import annotations

import time
from dataclasses import dataclass

import ray

from ray_etc.actors.ray_internals import draining_nodes

POLL_INTERVAL_S = 0.2


@dataclass(frozen=True)
class NodeDraining:
    """The node will go; `deadline` is Unix time in seconds, None where the notice named none (then: now)."""

    node_id: str
    deadline: float | None


@dataclass(frozen=True)
class NodeDied:
    node_id: str


NodeEvent = NodeDraining | NodeDied


class ClusterWatcher:
    """Compares Ray's tables with what it saw before. Polled by the run's own thread; one poll costs under 1 ms."""

    def __init__(self) -> None:
        self._alive: set[str] = set()
        self._draining: set[str] = set()
        self._last_poll = 0.0

    def poll(self) -> list[NodeEvent]:
        """Events since the last poll; at most one look at Ray every `POLL_INTERVAL_S`."""
        if time.monotonic() - self._last_poll < POLL_INTERVAL_S:
            return []
        self._last_poll = time.monotonic()
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        draining = {node_id: deadline for node_id, deadline in draining_nodes().items() if node_id in alive}
        events: list[NodeEvent] = [
            NodeDraining(node_id, draining[node_id]) for node_id in sorted(draining.keys() - self._draining)
        ]
        events += [NodeDied(node_id) for node_id in sorted(self._alive - alive)]
        self._alive, self._draining = alive, set(draining)
        return events
