"""`python -m ray_etc plan`, as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from ray_etc.plan_command import PlanOptions, run_plan
from ray_etc.planners.explain import size
from ray_etc.planners.zoo import ZOO

GROW = PlanOptions("llama3-70b", "tp=8,pp=4,dp=4", "tp=8,pp=4,dp=6", "16x8,24x8")


def facts_of(options: PlanOptions, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run_plan(replace(options, json=True)) == 0
    return json.loads(capsys.readouterr().out)


def test_dp4_to_dp6_in_figures(capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of(GROW, capsys)
    assert (facts["from"]["ranks"], facts["to"]["ranks"]) == (128, 192)
    assert facts["nbytes_needed"] == sum(facts["nbytes_by_link"].values())
    assert facts["nbytes_moved"] == facts["nbytes_lower_bound"] < facts["nbytes_moved_if_rank_i_took_slot_i"]
    assert facts["nbytes_by_link"]["same_node"] == 0  # a node is one tensor group, whose ranks share only norms
    # Each of the 64 new ranks gets all of its weights, and a third of the optimizer state is theirs.
    weights = facts["nbytes_moved"] - 12 * facts["parameters"] / 3
    assert weights == pytest.approx(2 * 2 * facts["parameters"], rel=2e-3)
    assert facts["busiest"]["slot_receives"]["nbytes"] > 2 * facts["parameters"] / 32
    assert facts["rounds_at_least"] == -(-facts["busiest"]["slot_receives"]["nbytes"] // 2**28)


def test_dp4_to_dp6_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(GROW) == 0
    text = capsys.readouterr().out
    for part in (
        "llama3-70b: 70.55 billion parameters",
        "TP8 PP4 DP6 ZeRO-1, 192 ranks, nodes 24x8 (192 GPUs), 8 join",
        "stays in its slot",
        ", the least possible.",
        "node that receives most from others",
    ):
        assert part in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_nodes_that_leave_send_and_do_not_receive(capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of(replace(GROW, source=GROW.target, target=GROW.source, nodes="24x8,16x8"), capsys)
    assert facts["busiest"]["node_sends"]["index"] >= 16
    assert facts["busiest"]["node_receives"]["index"] < 16


def test_tp4_to_tp2_dp2_is_proved_by_the_plan_itself(capsys: pytest.CaptureFixture[str]) -> None:
    options = PlanOptions("llama3-8b", "tp=4", "tp=2,dp=2", "1x4,1x4", prove=True)
    facts = facts_of(options, capsys)
    assert facts["rounds"] >= facts["rounds_at_least"]
    assert facts["plan"]["on the wire"] == f"{size(facts['nbytes_moved'])}, the least possible"
    assert run_plan(options) == 0
    assert "Every move made and proved:" in capsys.readouterr().out


def test_nothing_to_move(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(replace(GROW, target=GROW.source, nodes="16x8,16x8")) == 0
    text = capsys.readouterr().out
    assert "On the wire: 0 B, the least possible." in text
    assert "busiest" not in text


@pytest.mark.parametrize("model", [name for name, model in ZOO.items() if model.experts is None])
def test_every_dense_model_has_a_forecast(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    pp = 2 if ZOO[model].num_layers % 4 else 4
    options = PlanOptions(model, f"tp=8,pp={pp},dp=2", f"tp=4,pp={pp},dp=2", f"{2 * pp}x8,{pp}x8")
    facts = facts_of(options, capsys)
    assert facts["nbytes_lower_bound"] <= facts["nbytes_moved"] < facts["nbytes_needed"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target": "tp=16,pp=4,dp=6"}, "num_query_groups=8 cannot be split by tp=16; use tp=2 or tp=4 or tp=8"),
        ({"target": "tp=8,pp=81"}, "num_layers=80 cannot fill pp=81 stages; use pp<=80"),
        ({"target": "tp=8,pp=3"}, "TP8 PP3 DP1 layers 27-27-26 ZeRO-1: the forecast knows tp, pp and dp with even"),
        ({"target": "tp=8,pp=4,dp=7"}, "8 x pp=4 x dp=7 = 224 ranks need as many GPUs; 24x8 are 192, enough for dp<=6"),
        ({"nodes": "32x4,48x4"}, "tp=8 does not fit on a node of 4 GPUs; use tp<=4"),
        ({"nodes": "16x8,12x16"}, "nodes of 8 and of 16 GPUs; use one size"),
        ({"nodes": "16x8"}, "--nodes 16x8 is not like 128x8,192x8"),
        ({"target": "tp=8,sp=2"}, "'sp' is not one of tp, pp, dp, cp, ep, etp, vpp or layers, nor the word zero1 or"),
        ({"target": "tp=8,tp=4"}, "tp is given twice"),
        ({"source": "tp=0"}, "--from tp=0: tp=0 must be a whole number of at least 1"),
        ({"model": "llama4"}, "model 'llama4' is not known; use one of gpt3-1.3b"),
        ({"staging_mib": 0}, "--staging-mib 0 must be at least 1"),
    ],
)
def test_refused_with_the_numbers(changed: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(replace(GROW, **changed)) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out


def test_command_line_needs_neither_ray_nor_torch() -> None:
    script = """
import sys
from ray_etc.__main__ import main
sys.argv = "ray_etc plan --model llama3-8b --from tp=4 --to tp=2,dp=2 --nodes 1x4,1x4".split()
assert main() == 0
assert not {"ray", "torch", "megatron"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "TP4 PP1 DP1 ZeRO-1, 4 ranks" in done.stdout


def test_help_names_every_model() -> None:
    command = [sys.executable, "-m", "ray_etc", "plan", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert all(model in done.stdout for model in ZOO)
