"""A handover changes where the state is, and not one bit of it, for every model along every axis; see transition.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from matrix import ROWS, Row
from transition import check


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[] if row.quick else pytest.mark.slow) for row in ROWS], ids=str
)
def test_state_is_the_same_bits(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path)
