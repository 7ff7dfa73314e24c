"""The page of what is proven, written from the results of the tests: `python tests/megatron/page.py`.

It runs every row of the matrix, also the slow ones, and every refusal. test_page.py says when it must be run again.
On a host with GPUs, `python tests/megatron/page.py --gpus` runs the rows that are for them, and keeps their results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]  # as pytest has it

import pytest  # noqa: E402
from matrix import GROUPS, ROWS, Row, widened  # noqa: E402
from refusals import REFUSALS  # noqa: E402

from benchmarks.provenance import provenance  # noqa: E402

PAGE = HERE.parents[1] / "ray_etc" / "megatron" / "TRANSITIONS.md"
ON_GPUS = HERE.parents[1] / "benchmarks" / "results" / "transitions-on-gpus.json"
RANKS_ON_GPUS = 8

TABLE = ["| model | from | to | optimizer and model | compared with | result |", "|---|---|---|---|---|---|"]

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
its interface. So are those of Mamba's layers and of gated delta nets, whose kernels need a GPU.
"""


class _Outcomes:
    """A plugin of pytest that remembers which rows passed."""

    def __init__(self) -> None:
        self.passed: dict[str, bool] = {}

    def run(self, files: list[Path], *options: str) -> int:
        return int(pytest.main([*map(str, files), *options], plugins=[self]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("[")[2].removesuffix("]")
        self.passed[name] = self.passed.get(name, True) and report.passed


def render(passed: Mapping[str, bool]) -> str:
    """The page, given which rows and refusals passed, by their names."""
    lines = [HEAD]
    for group, rows in GROUPS.items():
        lines += [f"## {group}", "", *TABLE, *(_line(row, passed[str(row)]) for row in rows), ""]
    if reasons := sorted({row.why for row in ROWS if row.why}):
        lines += ["Why not with a checkpoint: " + "; ".join(reasons) + ".", ""]
    lines += _on_gpus(json.loads(ON_GPUS.read_text()))
    lines += ["## Refused before anything starts", "", "| what | by | with | result |", "|---|---|---|---|"]
    for refusal in REFUSALS:
        result = "refused" if passed[refusal.what] else "**fails**"
        lines.append(f"| {refusal.what} | {refusal.by} | ... {refusal.says} ... | {result} |")
    return "\n".join(lines) + "\n"


def _on_gpus(found: Mapping[str, Any]) -> list[str]:
    gpus = [gpu.partition(",")[0] for gpu in found["hardware"]["gpus"]]
    return [
        "## On GPUs",
        "",
        f"Up to {RANKS_ON_GPUS} ranks a generation on {len(gpus)} {gpus[0]}, each as on a host of its own: what its",
        "slot held comes by CUDA IPC, all else by NCCL over sockets.",
        "",
        *TABLE,
        *(_line(row, found["passed"].get(str(row))) for row in rows_on_gpus()),
        "",
    ]


def _line(row: Row, passed: bool | None) -> str:
    result = {True: "works", False: "**fails**", None: "not run yet"}[passed]
    return f"| {row.model} | {row.old} | {row.new} | {row.options} | {row.oracle} | {result} |"


def rows_on_gpus() -> list[Row]:
    return [widened(row, RANKS_ON_GPUS) for row in ROWS if row.gpus]


if __name__ == "__main__":
    outcomes = _Outcomes()
    if "--gpus" in sys.argv:
        code = outcomes.run([HERE.parent / "gpu" / "test_eight_ranks.py"])
        command = {"command": "python tests/megatron/page.py --gpus"}
        result = {**provenance("page"), **command, "ranks": RANKS_ON_GPUS, "passed": outcomes.passed}
        ON_GPUS.write_text(json.dumps(result, indent=2) + "\n")
    else:
        code = outcomes.run([HERE / "test_matrix.py", HERE / "test_refusals.py"], "-m", "slow or not slow")
        PAGE.write_text(render(outcomes.passed))
    sys.exit(code)
