"""What whole plans cost: time, memory and bytes, from 128 ranks to 100,000, beside a plain reshard.

    python -m benchmarks.planning --json benchmarks/results/planning.json

A whole plan is both layouts, the assignment, sources, rounds and the check. Each case runs in a fresh process (see
planning_case.py), so its peak memory is its own. FILE gets a list, a row a case; where it came from goes to
FILE.provenance.json beside it, with the slopes of the growth series. The exit status is 0 only if every target is met.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import provenance

GIB = 2**30
CASE_S = 600


@dataclass(frozen=True)
class Case:
    """A resize of a model of the zoo; `old` and `new` are options of ParallelConfig. A series has no targets."""

    name: str
    model: str
    old: dict[str, int]
    new: dict[str, int]
    target_s: float | None = None
    target_rss_nbytes: int | None = None


def _dense(tp: int, pp: int, dp: int) -> dict[str, int]:
    return {"tensor_parallel": tp, "pipeline_parallel": pp, "data_parallel": dp}


def _expert(pp: int, ep: int, dp: int) -> dict[str, int]:
    return {"pipeline_parallel": pp, "expert_parallel": ep, "data_parallel": dp}


CASES = (
    Case("llama3-70b 1,024 to 1,536", "llama3-70b", _dense(8, 4, 32), _dense(8, 4, 48), 1.0, GIB),
    Case("deepseek-v3 ep64 2,048 to 1,536", "deepseek-v3", _expert(8, 64, 256), _expert(8, 64, 192), 5.0, 4 * GIB),
    Case("llama3-405b 16,384 to 15,360", "llama3-405b", _dense(8, 16, 128), _dense(8, 16, 120), 10.0, 8 * GIB),
    Case("llama3-405b 100,352 to 94,208", "llama3-405b", _dense(8, 16, 784), _dense(8, 16, 736)),
)
GROWTH = tuple(
    Case(f"growth llama3-70b dp{dp} to dp{dp * 3 // 2}", "llama3-70b", _dense(8, 4, dp), _dense(8, 4, dp * 3 // 2))
    for dp in (4, 8, 16, 32, 64, 128, 256, 512)
)


def run_case(case: Case, repeats: int) -> dict[str, Any]:
    """The row of `case`: the plan of median time of several fresh processes, and the plain reshard in one more."""
    runs = sorted((_fresh(case, "plan") for _ in range(repeats)), key=lambda run: run["time_s"])
    row = {"case": case.name} | runs[len(runs) // 2]
    row["times_s"] = [run["time_s"] for run in runs]
    row["peak_rss_bytes"] = max(run["peak_rss_bytes"] for run in runs)
    row |= _fresh(case, "naive")
    row["target_s"], row["target_rss_bytes"] = case.target_s, case.target_rss_nbytes
    return row


def _fresh(case: Case, what: str) -> dict[str, Any]:
    arguments = [json.dumps({"model": case.model, "old": case.old, "new": case.new}), what]
    command = [sys.executable, "-m", "benchmarks.planning_case", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=CASE_S)
    return json.loads(done.stdout.splitlines()[-1])


def slopes(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Slopes in the growth series of the logarithms of seconds against those of moves or ranks: 1 is linear."""
    series = [row for row in rows if row["case"].startswith("growth")]
    if len(series) < 2:
        return {}
    larger = series[-max(2, len(series) // 2) :]
    return {
        "slope_of_time_against_moves": _slope(series, "moves", "time_s"),
        "slope_of_cpu_time_against_moves": _slope(series, "moves", "cpu_s"),
        "slope_of_cpu_time_against_moves_larger_half": _slope(larger, "moves", "cpu_s"),
        "slope_of_naive_time_against_ranks": _slope(series, "ranks_to", "naive_time_s"),
    }


def _slope(rows: list[dict[str, Any]], x: str, y: str) -> float:
    return round(float(np.polyfit([math.log(row[x]) for row in rows], [math.log(row[y]) for row in rows], 1)[0]), 3)


def is_on_target(row: dict[str, Any]) -> bool:
    time_s, nbytes = row["target_s"], row["target_rss_bytes"]
    return (time_s is None or row["time_s"] <= time_s) and (nbytes is None or row["peak_rss_bytes"] <= nbytes)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| case | time s (CPU; naive) | peak GiB | moves | rounds | GB moved (least; naive) | busiest GB (naive) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        scaled = "~" if row["naive_sampled_ranks"] is not None else ""
        at_least = ">= " if row["naive_busiest_is_lower_bound"] else ""
        lines.append(
            f"| {row['case']} | {row['time_s']:.2f} ({row['cpu_s']:.2f}; {scaled}{row['naive_time_s']:.1f}) "
            f"| {row['peak_rss_bytes'] / GIB:.2f} | {row['moves']:,} | {row['rounds']} "
            f"| {row['nbytes_moved'] / 1e9:,.0f} ({row['nbytes_lower_bound'] / 1e9:,.0f}; "
            f"{row['naive_nbytes_moved'] / 1e9:,.0f}) | {row['busiest_link_bytes'] / 1e9:.3f} "
            f"({at_least}{row['naive_busiest_link_bytes'] / 1e9:.1f}) |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes a plan; the median time counts")
    arguments = parser.parse_args()
    head = provenance("benchmarks.planning")
    rows = []
    for case in (*CASES, *GROWTH):
        if arguments.only in case.name:
            rows.append(run_case(case, arguments.repeats))
            print(f"{case.name}: {rows[-1]['time_s']:.2f} s", file=sys.stderr, flush=True)
    print(table(rows))
    found = slopes(rows)
    for name, value in found.items():
        print(f"{name}: {value:.2f}")
    head |= found
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
        arguments.json.with_suffix(".provenance.json").write_text(json.dumps(head, indent=1) + "\n")
    return 0 if all(map(is_on_target, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
