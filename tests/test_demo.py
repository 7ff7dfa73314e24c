"""The README's first command, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


def test_demo_grows_changes_shrinks_and_loses_nothing(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "ray_etc", "demo", "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads(result.read_text())
    assert len(summary["loss"]) == len(summary["loss_unbroken"]) == summary["steps"]
    difference = max(abs(a - b) for a, b in zip(summary["loss"], summary["loss_unbroken"], strict=True))
    assert difference == summary["loss_max_abs_difference"] < 5e-4
    assert summary["loss"][-1] < summary["loss"][0] - 1
    assert summary["samples_in_order"] is True
    shapes = [
        tuple(record[side][f"{axis}_parallel"] for axis in ("tensor", "pipeline", "data"))
        for record in summary["resizes"]
        for side in ("parallel_from", "parallel_to")
    ]
    assert shapes == [(2, 1, 1), (2, 1, 2), (2, 1, 2), (1, 2, 2), (1, 2, 2), (1, 2, 1)]
    for record in summary["resizes"]:
        assert record["certified"] is True
        assert 0 < record["nbytes_lower_bound"] <= record["nbytes_wire"]
        assert record["nbytes_local"] > 0
        phases = record["phases"]
        assert 0 < record["pause_s"] < phases["prepare"]
        stages = [phases[stage] for stage in ("start", "import", "join", "build", "warm_up")]
        assert max(stages) < phases["prepare"] < sum(stages) + 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "--data nowhere does not exist: give a text file, a folder"),
        (["--steps", "5"], "--steps 5 leaves no room for three resizes; use at least 40"),
    ],
)
def test_mistakes_are_told_before_anything_starts(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "ray_etc", "demo", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert message in " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in done.stderr
