"""The slots that a run waits for bring nodes, and those it gives up let them go: with Ray's real autoscaler."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from autoscaled_cluster import AutoscaledCluster, autoscaled_cluster
from toy import BATCH, expected_weights

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

DRIVER = Path(__file__).with_name("autoscaler_driver.py")


@pytest.fixture
def autoscaled() -> Iterator[AutoscaledCluster]:
    """Two slots on the head; the autoscaler may add one node with two more, and takes it away after 2 idle seconds."""
    with autoscaled_cluster(head_cpus=2, node_cpus=2, most_nodes=1, idle_timeout_s=2.0) as cluster:
        yield cluster


def test_dp2_to_dp4_when_the_autoscaler_adds_a_node_and_back_when_it_removes_it(
    autoscaled: AutoscaledCluster, tmp_path: Path
) -> None:
    command = [sys.executable, str(DRIVER), autoscaled.address, str(autoscaled.config_file), str(tmp_path)]
    driver = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert driver.returncode == 0, driver.stderr
    seen = json.loads(driver.stdout.splitlines()[-1])

    assert [(moment["what"], moment["nodes"], moment["ranks"], moment["groups"]) for moment in seen["moments"]] == [
        ("trains on the head", 1, 2, {"CREATED": 2, "PENDING": 2}),
        ("node joined", 2, 2, {"CREATED": 4}),
        ("grown", 2, 4, {"CREATED": 4}),
        ("trained on after growing", 2, 4, {"CREATED": 4}),
        ("shrunk", 2, 2, {"CREATED": 2, "REMOVED": 2}),
        ("node removed", 1, 2, {"CREATED": 2, "REMOVED": 2}),
        ("trained on after shrinking", 1, 2, {"CREATED": 2, "REMOVED": 2}),
        ("ended", 1, 2, {"REMOVED": 4}),
    ]
    assert [(resize["reason"], resize["ranks"]) for resize in seen["resizes"]] == [
        ("slots joined", [2, 4]),
        ("requested", [4, 2]),
    ]
    assert all(resize["certified"] for resize in seen["resizes"])

    steps = [moment["step"] for moment in seen["moments"]]
    assert steps == sorted(set(steps)), "training stood still while the cluster changed"
    assert seen["weight"] == expected_weights(seen["steps"])
    assert seen["samples"] == list(range(seen["steps"] * BATCH))
