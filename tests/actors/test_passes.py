from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_etc.actors import sums
from ray_etc.actors.passes import Job, Pass, chunk_table, job_table

CHUNK_TILES = pytest.importorskip("ray_etc.actors.kernels.tiles", reason="triton is not installed").CHUNK_TILES


def test_kernel_in_tritons_interpreter() -> None:
    file = Path(__file__).with_name("interpreted_tiles.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(file)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stdout


def test_work_is_cut_evenly_and_covers_every_tile_once() -> None:
    small, large = torch.zeros(3, dtype=torch.int32), torch.zeros(1_000_000, dtype=torch.int32)
    table, dims = job_table([Job(small, small), Job(large, large)])
    chunks = chunk_table(table).tolist()
    assert dims == 1
    assert chunks == [[0, 0], *([1, first] for first in range(0, 123, CHUNK_TILES))]


def test_dims_that_lie_side_by_side_are_one() -> None:
    whole = torch.zeros(8, 6, 32, dtype=torch.int32)

    def described(source: torch.Tensor, into: torch.Tensor) -> Any:
        table, dims = job_table([Job(source, into)])
        return dims, table[0, 3], table[0, 6 : 6 + dims].tolist()

    assert described(whole, torch.zeros_like(whole)) == (1, 16, [384])
    assert described(whole[:, 2:4], torch.zeros(8, 2, 32, dtype=torch.int32)) == (2, 16, [16, 8])
    assert described(whole[2:4], whole[4:6]) == (1, 16, [96])
    assert described(whole[:, :, :16], torch.zeros(8, 6, 16, dtype=torch.int32)) == (2, 16, [4, 48])
    assert described(whole[:, :, 1:16], whole[:, :, 17:]) == (2, 4, [15, 48])
    assert described(whole.transpose(0, 2), torch.zeros(32, 6, 8, dtype=torch.int32)) == (4, 4, [1, 8, 6, 32])


def test_pass_on_a_cpu_does_the_same() -> None:
    source = torch.arange(60, dtype=torch.int16).view(6, 10)
    into, totals = torch.zeros(6, 5, dtype=torch.int16), torch.zeros(4, dtype=torch.int64)
    Pass([Job(source[:, :5], into, left=1, arrived=2)], totals).run()
    Pass([Job(None, into, arrived=3)], totals).run()
    assert torch.equal(into, source[:, :5])
    assert totals.tolist() == [0, *[sums.weighted_sum(into)] * 3]
    assert not Pass([Job(source[:0], into[:0])], totals)


def test_slices_too_large_to_count_are_refused() -> None:
    huge = torch.zeros(1, dtype=torch.int8).expand(2**31)
    with pytest.raises(ValueError, match="over 2147418112"):
        job_table([Job(huge, huge)])
