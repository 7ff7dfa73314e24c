"""What tests/gpu/test_eight_ranks.py does on GPUs, on CPUs and with four ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from matrix import ROWS, Row, widened
from seats import Seats
from transition import check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RANKS = 4


@pytest.fixture(scope="module")
def seats() -> Iterator[Seats]:
    with Seats(RANKS, gpus=0) as seats:
        yield seats


@pytest.mark.parametrize("row", [widened(row, RANKS) for row in ROWS if row.gpus], ids=str)
def test_state_is_the_same_bits_in_processes_that_host_many_ranks(row: Row, seats: Seats) -> None:
    try:
        check(row, where=seats)
    except BaseException:
        seats.clear()
        raise
