"""How soon a rank is there depends on what it imports, so what it has no use for stays out."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

UNUSED = {"scipy", "pandas", "ray_etc.planners.plan", "ray_etc.planners.migrate", "torch._inductor.compile_fx"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU Megatron compiles")
def test_rank_without_a_gpu_loads_neither_the_planner_nor_the_compiler() -> None:
    code = "import sys, ray_etc.actors.rank, ray_etc.megatron; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    loaded = set(done.stdout.split())
    assert "megatron.core.models.gpt.gpt_model" in loaded
    assert not UNUSED & loaded
