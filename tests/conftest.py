"""Set before anything imports Ray: loopback only, several clusters on one machine, no surprise from outside."""

import os
import sys
from pathlib import Path

from hypothesis import settings

os.environ.update(
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # else Ray rewrites 127.0.0.1 to the address of a network card
    RAY_AUTH_MODE="disabled",  # a local ray.init() would write a token that later clusters refuse
    RAY_memory_monitor_refresh_ms="0",  # it counts the memory of every process on the machine
    RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",  # under `uv run` Ray would build an environment for each worker
    RAY_TRAIN_V2_ENABLED="1",
    RAY_worker_niceness="0",  # by default Ray lets its workers starve beside anything else that runs
    OMP_NUM_THREADS="1",
)

# An example may take any time: the machine may be busy.
settings.register_profile("any time", settings.default, deadline=None)
settings.load_profile("any time")

# The GPU tests run the same processes, layouts, loops and oracles as those of the CPU.
sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("actors", "megatron", "trainer")]
