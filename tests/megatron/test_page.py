"""The page of transitions is that of this matrix, and all of it works."""

from __future__ import annotations

from matrix import ROWS
from page import PAGE, render
from refusals import REFUSALS


def test_page_is_current() -> None:
    names = [str(row) for row in ROWS] + [refusal.what for refusal in REFUSALS]
    assert len(set(names)) == len(names), "two rows have one name"
    assert PAGE.read_text() == render(dict.fromkeys(names, True)), "run `python tests/megatron/page.py`"


def test_the_matrix_is_wide_enough() -> None:
    assert len(ROWS) >= 80
    assert sum(row.quick for row in ROWS) >= 30
