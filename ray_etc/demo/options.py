"""What the demo can be told, and the environment that it needs before Ray is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DemoOptions:
    """Train a small GPT while nodes join and leave, and compare it with a run that was never resized."""

    steps: int = 40
    """Steps to train."""
    seed: int = 1234
    """Seed of the weights and of the order of the samples."""
    data: Path | None = None
    """A text file, a folder of text files, or the prefix of a Megatron .bin/.idx pair; by default the sources of
    Python's standard library."""
    json: Path | None = None
    """Write the result here, as one JSON object."""
    gpus: bool = False
    """Use the GPUs of this machine, and NCCL."""

    def mistake(self) -> str | None:
        """What cannot work about these options, in one line; None where nothing is wrong."""
        if self.steps < 40:
            return f"--steps {self.steps} leaves no room for three resizes; use at least 40"
        if self.data is not None and not any(Path(f"{self.data}{suffix}").exists() for suffix in ("", ".bin")):
            return (
                f"--data {self.data} does not exist: give a text file, a folder, or the prefix of a Megatron "
                ".bin/.idx pair"
            )
        return None


def set_environment() -> None:
    """Several Ray nodes on one machine, on loopback only. Must come before `import ray`."""
    os.environ.update(
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # else Ray rewrites 127.0.0.1 to the address of a network card
        RAY_AUTH_MODE="disabled",  # a local ray.init() would write a token that later clusters refuse
        RAY_memory_monitor_refresh_ms="0",  # it counts the memory of every process on the machine
        RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",  # under `uv run` Ray would build an environment for each worker
        RAY_worker_niceness="0",  # by default Ray lets its workers starve beside anything else that runs
        RAY_TRAIN_V2_ENABLED="1",
        RAY_DEDUP_LOGS="1",
        NCCL_NVLS_ENABLE="0",
    )
