"""Every call into Ray that Ray does not promise to keep, in one place (checked against Ray 2.60)."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import RayActorError


def draining_nodes() -> dict[str, float | None]:
    """Nodes that Ray was told to drain, with their deadline as Unix time in seconds (None: no deadline was given).

    `ray.nodes()` never shows a drain; Ray Train and Ray Data read the same private table.
    """
    from ray._private.state import state

    return {
        node_id: (deadline_ms / 1000 if deadline_ms else None)
        for node_id, deadline_ms in state.get_draining_nodes().items()
    }


def drain_node(node_id: str, deadline_s: float, why: str) -> None:
    """Tell Ray that the node will be taken away in `deadline_s` seconds, as a cloud's spot notice would.

    Raises:
        RuntimeError: Ray did not accept, with its reason.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated import autoscaler_pb2

    gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, message = gcs.drain_node(node_id, reason, why, int((time.time() + deadline_s) * 1000))
    if not accepted:
        raise RuntimeError(f"Ray did not accept to drain node {node_id[:8]}: {message}")


def slot_resources(scaling_config: Any) -> dict[str, float]:
    """The resources of one worker, with Ray Train's defaults and accelerator type filled in."""
    return {name: float(amount) for name, amount in scaling_config._resources_per_worker_not_none.items() if amount}


def label_selector(scaling_config: Any) -> dict[str, str] | None:
    """The label selector of a worker, or None."""
    selectors = scaling_config._label_selector_per_worker(1)
    return selectors[0] if selectors else None


def train_run_context(run_config: Any, train_loop_config: dict[str, Any] | None, scaling_config: Any) -> Any:
    """The context that Ray Train passes to its callbacks."""
    from ray.train import BackendConfig, DataConfig
    from ray.train.v2._internal.execution.context import TrainRunContext

    return TrainRunContext(run_config, train_loop_config, scaling_config, BackendConfig(), DataConfig())


def is_about(death: RayActorError, actor: Any) -> bool:
    """Whether an actor's death is that of `actor`."""
    return death.actor_id == actor._actor_id.hex()


def register_backend(name: str, group_class: type) -> None:
    """Add a backend to `ray.util.collective` in this process; Ray refuses to be told twice."""
    from ray.util.collective.backend_registry import _global_registry, register_collective_backend

    if not _global_registry.is_registered(name):
        register_collective_backend(name, group_class)
