"""Set before anything imports Ray: loopback only, several clusters on one machine, no surprise from outside."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.update(
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # else Ray rewrites 127.0.0.1 to the address of a network card
    RAY_AUTH_MODE="disabled",  # a local ray.init() would write a token that later clusters refuse
    RAY_memory_monitor_refresh_ms="0",  # it counts the memory of every process on the machine
    RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",  # under `uv run` Ray would build an environment for each worker
    RAY_TRAIN_V2_ENABLED="1",
    RAY_worker_niceness="0",  # by default Ray lets its workers starve beside anything else that runs
    OMP_NUM_THREADS="1",
)

# The GPU tests run the same processes, layouts, loops and oracles as those of the CPU.
sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("actors", "trainer")]


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For `-n 2 --dist loadgroup`: one takes all that starts Ray or uses GPUs, one by one."""
    if not config.pluginmanager.hasplugin("xdist"):
        return  # the hosts with GPUs may not have it

    def is_alone(item: pytest.Item) -> bool:
        return any(item.get_closest_marker(name) for name in ("ray", "gpu"))

    items.sort(key=lambda item: not is_alone(item))  # the longest group first
    for item in items:
        item.add_marker(pytest.mark.xdist_group("alone" if is_alone(item) else item.path.name))
