"""The page of what is proven, written from the results of the tests: `python tests/megatron/page.py`.

It runs every row of the matrix, also the slow ones, and every refusal. test_page.py says when it must be run again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]  # as pytest has it

import pytest  # noqa: E402
from matrix import GROUPS, ROWS, Row  # noqa: E402
from refusals import REFUSALS  # noqa: E402

PAGE = HERE.parents[1] / "ray_etc" / "megatron" / "TRANSITIONS.md"

HEAD = """# What a resize of a Megatron-core model keeps

Written by `python tests/megatron/page.py` from the results of the tests, with megatron-core 0.19 on CPUs.

Each row trains two steps under one configuration, hands the state over to another, hands it on to a third generation
that is like the first, and trains on. Weights, main weights, moments and buffers are compared bit for bit and by
position, step counts, loss scales, the scheduler and the cursor of the data by value. "checkpoint": what arrived is
what Megatron's own distributed checkpoint gives, saved under the old configuration and loaded under the new one.
"catalogue": where Megatron's checkpoint does not support the transition, it is compared with the whole tensors put
together out of what the old ranks said they held.

Not yet run for real is what needs Transformer Engine, which is not to be had where these tests run: its grouped
experts, and its Adam for Megatron's precision-aware optimizer (`fused_adam`). Their rows are of stand-ins for it, with
its interface. So are those of Mamba's layers, whose kernels need a GPU.
"""


class _Outcomes:
    """A plugin of pytest that remembers which rows passed."""

    def __init__(self) -> None:
        self.passed: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("[")[2].removesuffix("]")
        self.passed[name] = self.passed.get(name, True) and report.passed


def render(passed: Mapping[str, bool]) -> str:
    """The page, given which rows and refusals passed, by their names."""
    lines = [HEAD]
    for group, rows in GROUPS.items():
        lines += [
            f"## {group}",
            "",
            "| model | from | to | optimizer and model | compared with | result |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_line(row, passed[str(row)]) for row in rows]
        lines.append("")
    if reasons := sorted({row.why for row in ROWS if row.why}):
        lines += ["Why not with a checkpoint: " + "; ".join(reasons) + ".", ""]
    lines += ["## Refused before anything starts", "", "| what | by | with | result |", "|---|---|---|---|"]
    for refusal in REFUSALS:
        result = "refused" if passed[refusal.what] else "**fails**"
        lines.append(f"| {refusal.what} | {refusal.by} | ... {refusal.says} ... | {result} |")
    return "\n".join(lines) + "\n"


def _line(row: Row, passed: bool) -> str:
    result = "works" if passed else "**fails**"
    return f"| {row.model} | {row.old} | {row.new} | {row.options} | {row.oracle} | {result} |"


if __name__ == "__main__":
    outcomes = _Outcomes()
    files = [str(HERE / name) for name in ("test_matrix.py", "test_refusals.py")]
    code = pytest.main([*files, "-m", "slow or not slow"], plugins=[outcomes])
    PAGE.write_text(render(outcomes.passed))
    sys.exit(code)
