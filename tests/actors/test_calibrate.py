"""The table that a calibration makes of what its processes saw; and one such calibration on CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ray_etc import calibrate_command
from ray_etc.calibrate_command import CalibrateOptions, Measured, run_calibrate, table_of
from ray_etc.planners.links import Links


def test_slowest_process_decides_and_direct_is_the_least_size_near_the_best_rate() -> None:
    fast = Measured(4e12, {4096: 1e-5, 1 << 20: 2e-5, 1 << 30: 3e-3})
    slow = Measured(2e12, {4096: 2e-5, 1 << 20: 3e-5, 1 << 30: 4e-3})
    links = table_of([fast, slow], {"machine": "x"})
    assert links == Links(
        copy_bytes_per_s=2e12,
        same_node_bytes_per_s=(1 << 30) / 4e-3,
        message_s=2e-5,
        direct_nbytes=1 << 30,
        measured_on={"machine": "x"},
    )
    even = Measured(1e12, {4096: 4096 / 1e11, 1 << 20: (1 << 20) / 1.96e11, 1 << 30: (1 << 30) / 2e11})
    assert table_of([even], {}).direct_nbytes == 1 << 20


def test_process_without_a_partner_leaves_the_messages_of_the_others() -> None:
    alone = Measured(1e12, {})
    pair = Measured(2e12, {4096: 1e-5})
    assert table_of([pair, pair, alone], {}).message_s == 1e-5
    assert table_of([alone], {}).same_node_bytes_per_s == Links().same_node_bytes_per_s


def test_calibration_on_cpus_writes_a_table_that_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    out = tmp_path / "links.json"
    assert run_calibrate(CalibrateOptions(out)) == 0
    links = Links.load(out)
    assert links.measured_on["processes"] == "2 on CPUs over gloo"
    assert 1e7 < links.same_node_bytes_per_s < 1e12
    assert "not measured" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine where asking for a GPU fails")
def test_process_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match="process 0 of the calibration failed"):
        calibrate_command.measure(1, use_gpus=True)


def test_a_missing_folder_is_named_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate_command, "measure", lambda *_, **__: pytest.fail("measured"))
    out = tmp_path / "none" / "links.json"
    assert run_calibrate(CalibrateOptions(out)) == 2
    assert capsys.readouterr().err == f"error: --out {out}: there is no folder {out.parent}\n"
