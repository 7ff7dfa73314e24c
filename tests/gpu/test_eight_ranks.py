"""A dozen transitions of the matrix and two of experts, in bf16 with ZeRO-1: eight ranks on two GPUs, or one, as eight
hosts.

A generation of eight ranks hands over to one of up to eight by CUDA IPC and NCCL over sockets, and that one back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from matrix import ROWS, Row, widened
from seats import Seats
from transition import check

from ray_etc.actors.transports import NcclTransport

WHY_NOT = NcclTransport.why_unavailable()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

RANKS, GPUS = 8, min(2, torch.cuda.device_count())


@pytest.fixture(scope="module")
def seats() -> Iterator[Seats]:
    with Seats(RANKS, GPUS) as seats:
        yield seats


@pytest.mark.parametrize("row", [widened(row, RANKS) for row in ROWS if row.gpus], ids=str)
def test_state_is_the_same_bits_over_nccl(row: Row, seats: Seats) -> None:
    start = time.monotonic()
    try:
        check(row, where=seats)
    except BaseException:
        seats.clear()
        raise
    print(f"{row}: {time.monotonic() - start:.1f} s", flush=True)
