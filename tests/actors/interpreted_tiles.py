"""The kernel's copies and sums against plain torch and numpy, by Triton's interpreter: no GPU is needed.

`test_passes.py` runs this file in a process of its own, because Triton decides at its import whether to interpret.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slices import DTYPES, HOWS, memory

from ray_etc.actors import sums
from ray_etc.actors.kernels.tiles import copy_and_sum
from ray_etc.actors.passes import Job, chunk_table, job_table

TICKET_COUNT = 5


def launch(jobs: list[Job], totals: torch.Tensor, programs: int = 3, ticket: torch.Tensor | None = None) -> None:
    table, dims = job_table(jobs)
    chunks = chunk_table(table)
    copies, left, arrived = jobs[0].form
    copy_and_sum[(programs,)](
        torch.from_numpy(table),
        torch.from_numpy(chunks),
        len(chunks),
        ticket,
        TICKET_COUNT,
        totals,
        DIMS=dims,
        COPY=copies,
        LEFT=left,
        ARRIVED=arrived,
        TICKETS=ticket is not None,
    )


@st.composite
def slice_pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 8, 16, 31]), min_size=0, max_size=4))
    itemsize = draw(st.sampled_from(sorted(DTYPES)))
    source = memory(shape, itemsize, draw(st.sampled_from(HOWS)), True)
    return source, memory(shape, itemsize, draw(st.sampled_from(HOWS)), False)


@settings(max_examples=12)
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
    source = memory([2, 65, 256], itemsize, how, True)
    into = memory([2, 65, 256], itemsize, "inside", False)
    totals = torch.zeros(3, dtype=torch.int64)
    launch([Job(source, into, left=1, arrived=2)], totals)
    assert torch.equal(source, into)
    assert totals.tolist() == [0, sums.weighted_sum(source), sums.weighted_sum(source)]


def test_second_launch_takes_over_what_the_first_has_not_begun() -> None:
    pairs = [(memory([3, 40], 4, "plain", True), memory([3, 40], 4, "gaps", False)) for _ in range(TICKET_COUNT)]
    jobs = [Job(*pair, left=0, arrived=1) for pair in pairs]  # one chunk and so one ticket each
    totals, ticket = torch.zeros(2, dtype=torch.int64), torch.tensor([2])
    launch(jobs, totals, ticket=ticket)
    assert [torch.equal(*pair) for pair in pairs] == [False, False, True, True, True]
    assert ticket.item() == TICKET_COUNT + 3  # each of 3 programs draws one in vain
    ticket.zero_()
    totals.zero_()
    launch(jobs, totals, programs=1, ticket=ticket)
    launch(jobs, totals, ticket=ticket)
    assert all(torch.equal(*pair) for pair in pairs)
    total = sum(sums.weighted_sum(source) for source, _ in pairs)
    assert totals.tolist() == 2 * [(total + 2**63) % 2**64 - 2**63]


def test_copy_without_sums_writes_nothing_beside_its_destinations() -> None:
    source = torch.arange(40 * 700, dtype=torch.int32).view(40, 700)
    room = torch.full((42, 702), -1, dtype=torch.int32)
    launch([Job(source, room[1:-1, 1:-1])], torch.zeros(1, dtype=torch.int64))
    assert torch.equal(room[1:-1, 1:-1], source)
    room[1:-1, 1:-1] = -1
    assert (room == -1).all()
