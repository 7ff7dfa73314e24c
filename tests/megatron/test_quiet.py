"""A checkpoint is written and read without a warning that a user can do nothing about; others are still heard."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

from ranks import run_ranks
from tiny import build, parallel

CODE = "from test_quiet import Path, save_and_load; save_and_load(Path({!r}))"
"""In a process of its own: pytest takes the filters of imports back."""


def save_and_load(folder: Path) -> None:
    run_ranks(save, 2, folder)
    run_ranks(load, 2, folder)
    warnings.warn_explicit("a file is damaged", UserWarning, "utils.py", 1, "torch.distributed.checkpoint.utils")


def save(folder: Path) -> None:
    task = build(parallel(dp=2), bf16=True)
    task.train_step()
    task.save_checkpoint(folder)


def load(folder: Path) -> None:
    build(parallel(tp=2, sp=True), bf16=True, checkpoint=folder)


def test_only_what_a_user_can_do_something_about_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(str(tmp_path))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "utils.py:1: UserWarning: a file is damaged\n"
