"""The planner runs where neither ray nor torch can be imported."""

from __future__ import annotations

import subprocess
import sys


def test_importing_every_planner_pulls_in_neither_ray_nor_torch() -> None:
    script = """
import importlib, pkgutil, sys
import ray_etc.planners
names = [module.name for module in pkgutil.iter_modules(ray_etc.planners.__path__, "ray_etc.planners.")]
assert "ray_etc.planners.migrate" in names, names
for name in names:
    importlib.import_module(name)
print(sorted({"ray", "torch", "megatron"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
