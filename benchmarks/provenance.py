"""Where a result came from: hardware, versions, date and command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from typing import Any

PACKAGES = ("ray", "torch", "cupy-cuda13x", "megatron-core", "numpy")


def provenance(module: str) -> dict[str, Any]:
    """For the head of a result file of `python -m module`."""
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _output("git", "rev-parse", "HEAD"),
        "hardware": {
            "cpus": os.cpu_count(),
            "machine": platform.machine(),
            "gpus": _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        },
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def _output(*command: str) -> list[str] | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
