"""The kernel's copies and sums against plain torch and numpy, by Triton's interpreter: no GPU is needed.

`test_passes.py` runs this file in a process of its own, because Triton decides at its import whether to interpret.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slices import HOWS, memory, slice_pairs

from ray_etc.actors import sums
from ray_etc.actors.kernels.tiles import copy_and_sum
from ray_etc.actors.passes import Job, chunk_table, job_table


def launch(jobs: list[Job], totals: torch.Tensor, programs: int = 3) -> None:
    table, dims = job_table(jobs)
    chunks = chunk_table(table)
    copies, left, arrived = jobs[0].form
    copy_and_sum[(programs,)](
        torch.from_numpy(table),
        torch.from_numpy(chunks),
        len(chunks),
        totals,
        DIMS=dims,
        COPY=copies,
        LEFT=left,
        ARRIVED=arrived,
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(slice_pairs(), min_size=1, max_size=4))
def test_any_slices_are_copied_and_summed_as_on_a_cpu(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    count = len(pairs)
    totals = torch.zeros(3 * count, dtype=torch.int64)
    launch([Job(source, into, number, count + number) for number, (source, into) in enumerate(pairs)], totals)
    launch([Job(None, into, arrived=number) for number, (_, into) in enumerate(pairs, 2 * count)], totals)
    assert all(torch.equal(source, into) for source, into in pairs)
    assert totals.tolist() == 3 * [sums.weighted_sum(source) for source, _ in pairs]


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("how", HOWS)
def test_slices_of_many_tiles(itemsize: int, how: str) -> None:
    source = memory([3, 129, 256], itemsize, how, True)
    into = memory([3, 129, 256], itemsize, "inside", False)
    totals = torch.zeros(3, dtype=torch.int64)
    launch([Job(source, into, left=1, arrived=2)], totals)
    assert torch.equal(source, into)
    assert totals.tolist() == [0, sums.weighted_sum(source), sums.weighted_sum(source)]


def test_copy_without_sums_writes_nothing_beside_its_destinations() -> None:
    source = torch.arange(40 * 700, dtype=torch.int32).view(40, 700)
    room = torch.full((42, 702), -1, dtype=torch.int32)
    launch([Job(source, room[1:-1, 1:-1])], torch.zeros(1, dtype=torch.int64))
    assert torch.equal(room[1:-1, 1:-1], source)
    room[1:-1, 1:-1] = -1
    assert (room == -1).all()
