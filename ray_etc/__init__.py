"""Elastic training of large language models on Ray: resizes move the state from GPU to GPU, without a checkpoint.

Names are imported when they are first used, so that the planner needs neither Ray nor torch, and a rank does not
load what only the driver needs. `ray_etc.megatron` is imported on its own: it brings Megatron-core in.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_etc.actors.context import Context
    from ray_etc.actors.errors import CertificateError, ResizeFailed, StateLost, TransportError
    from ray_etc.actors.ray_internals import drain_node
    from ray_etc.actors.record import ResizeRecord
    from ray_etc.actors.state import StateShard, TrainState
    from ray_etc.loop import get_context, report, steps
    from ray_etc.planners.links import Links
    from ray_etc.planners.parallel import ParallelConfig
    from ray_etc.planners.plan import MigrationPlan
    from ray_etc.results import ElasticCallback, ElasticResult
    from ray_etc.trainer import ElasticRun, ElasticTrainer, RunStatus

__all__ = [
    "CertificateError",
    "Context",
    "ElasticCallback",
    "ElasticResult",
    "ElasticRun",
    "ElasticTrainer",
    "Links",
    "MigrationPlan",
    "ParallelConfig",
    "ResizeFailed",
    "ResizeRecord",
    "RunStatus",
    "StateLost",
    "StateShard",
    "TrainState",
    "TransportError",
    "drain_node",
    "get_context",
    "report",
    "steps",
]

_HOMES = {
    "ray_etc.actors.errors": ("CertificateError", "ResizeFailed", "StateLost", "TransportError"),
    "ray_etc.actors.ray_internals": ("drain_node",),
    "ray_etc.actors.record": ("ResizeRecord",),
    "ray_etc.actors.context": ("Context",),
    "ray_etc.actors.state": ("StateShard", "TrainState"),
    "ray_etc.loop": ("get_context", "report", "steps"),
    "ray_etc.planners.links": ("Links",),
    "ray_etc.planners.parallel": ("ParallelConfig",),
    "ray_etc.planners.plan": ("MigrationPlan",),
    "ray_etc.results": ("ElasticCallback", "ElasticResult"),
    "ray_etc.trainer": ("ElasticRun", "ElasticTrainer", "RunStatus"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    if name == "megatron":
        return import_module("ray_etc.megatron")
    raise AttributeError(f"module 'ray_etc' has no attribute {name!r}")
