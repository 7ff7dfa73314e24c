"""`python -m ray_etc plan`, as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ray_etc.plan_arguments import load_model, parse_parallel
from ray_etc.plan_command import PlanOptions, plan_between, run_plan
from ray_etc.plan_report import Side
from ray_etc.planners.links import Links
from ray_etc.planners.words import size
from ray_etc.planners.zoo import ZOO

GROW = PlanOptions("llama3-70b", "tp=8,pp=4,dp=4", "tp=8,pp=4,dp=6", "16x8,24x8")
SHRINK = replace(GROW, source=GROW.target, target=GROW.source, nodes="24x8,16x8")
SMALL = PlanOptions("llama3-8b", "tp=2,dp=4", "tp=2,dp=6", "2x4,3x4")

RESIZES = {
    "gpt3-1.3b": ("dp=8", "tp=2,dp=6", "1x8,2x8"),
    "gpt3-6.7b": ("tp=4,dp=4", "tp=2,pp=2,dp=2", "2x8,1x8"),
    "gpt3-175b": ("tp=8,pp=12,dp=2", "tp=8,pp=16,dp=2", "24x8,32x8"),
    "llama2-7b": ("tp=2,cp=2,dp=2", "tp=2,dp=6,plain", "1x8,2x8"),
    "llama2-13b": ("tp=4,pp=2,vpp=2,dp=2", "tp=4,pp=2,dp=3", "2x8,3x8"),
    "llama2-70b": ("tp=8,pp=3,dp=3", "tp=8,pp=4,dp=2", "9x8,8x8"),
    "llama3-8b": ("fsdp,dp=16", "fsdp,dp=24", "2x8,3x8"),
    "llama3-70b": ("tp=8,pp=4,dp=32", "tp=8,pp=4,dp=48", "128x8,192x8"),
    "llama3-405b": ("tp=8,pp=16,dp=16", "tp=8,pp=16,dp=15", "256x8,240x8"),
    "mixtral-8x7b": ("tp=2,pp=4,dp=4,ep=8,etp=1", "tp=2,pp=4,dp=6,ep=4,etp=1", "4x8,6x8"),
    "qwen3-30b-a3b": ("pp=2,dp=8,ep=8", "pp=2,layers=25-23,dp=16,ep=8", "2x8,4x8"),
    "qwen3-235b-a22b": ("tp=4,pp=8,dp=4,ep=8,etp=1", "tp=4,pp=8,dp=6,ep=8,etp=1", "16x8,24x8"),
    "deepseek-v3": ("pp=8,dp=8,ep=8", "pp=8,dp=16,ep=8", "8x8,16x8"),
}
"""A resize of each model of the zoo, all axes among them."""

KEYS = {
    "model": None,
    "parameters": None,
    "from": {"tp", "pp", "dp", "cp", "ep", "etp", "vpp", "layers", "state", "ranks", "nodes", "node_size"},
    "to": {"tp", "pp", "dp", "cp", "ep", "etp", "vpp", "layers", "state", "ranks", "nodes", "node_size"},
    "nbytes_needed": None,
    "nbytes_moved": None,
    "nbytes_relayed": None,
    "nbytes_cast": None,
    "nbytes_lower_bound": None,
    "placement": None,
    "nbytes_moved_if_rank_i_took_slot_i": None,
    "links": {"same_slot", "same_node", "other_node"},
    "busiest": {"slot_sends", "slot_receives", "node_sends", "node_receives"},
    "rounds": None,
    "nbytes_staging": None,
    "predicted": {"wire_s", "local_s", "total_s"},
    "memory": {"nbytes_safe", "nbytes_tight", "nbytes_staging", "nbytes_free", "mode"},
    "largest_view_nbytes": None,
    "idle_nodes": None,
    "deadline": {"notice_s", "total_s", "saved_s", "fits_all", "fits_saved"},
    "planning_s": None,
    "proof_s": None,
}


def facts_of(options: PlanOptions, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run_plan(replace(options, json=True)) == 0
    return json.loads(capsys.readouterr().out)


def words_of(options: PlanOptions, capsys: pytest.CaptureFixture[str]) -> str:
    assert run_plan(options) == 0
    return capsys.readouterr().out


def test_dp4_to_dp6_in_figures(capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of(GROW, capsys)
    assert (facts["from"]["ranks"], facts["to"]["ranks"]) == (128, 192)
    assert facts["nbytes_needed"] == sum(use["nbytes"] for use in facts["links"].values())
    assert facts["nbytes_moved"] == facts["nbytes_lower_bound"] < facts["nbytes_moved_if_rank_i_took_slot_i"]
    assert facts["placement"] == "proven optimal"
    # Each of the 64 new ranks gets all of its weights, and a third of the optimizer state is theirs.
    weights = facts["nbytes_moved"] - 12 * facts["parameters"] / 3
    assert weights == pytest.approx(2 * 2 * facts["parameters"], rel=2e-3)
    most = facts["busiest"]["slot_receives"]
    assert most["nbytes"] > 2 * facts["parameters"] / 32
    assert most["slot"] >= 128
    assert most["node"] == f"node{most['slot'] // 8}"
    assert facts["rounds"] >= -(-most["nbytes"] // 2**29)
    assert facts["memory"]["nbytes_staging"] <= 4 * facts["nbytes_staging"]
    assert facts["deadline"] is None


def test_dp4_to_dp6_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    text, facts = words_of(GROW, capsys), facts_of(GROW, capsys)
    for part in (
        "llama3-70b: 70.55 billion parameters",
        "TP8 PP4 DP6 ZeRO-1, 192 ranks, nodes 24x8 (192 GPUs), 8 join",
        f"on the wire       {size(facts['nbytes_moved'])}, the least possible",
        "placement         proven optimal",
        "busiest node in   node",
        f"rank i on slot i  would move {size(facts['nbytes_moved_if_rank_i_took_slot_i'])}",
        "fits              safe, with the old state whole until the commit: 139 GiB a GPU, 6 of them for contexts",
        f"a rank's view     at most {size(facts['largest_view_nbytes'])} of the plan",
    ):
        assert part in text
    assert all(len(line) <= 110 for line in text.splitlines())


def test_json_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts read them: they may grow, but not change."""
    facts = facts_of(replace(SMALL, deadline_s=60), capsys)
    assert {key: set(value) if isinstance(value, dict) else None for key, value in facts.items()} == KEYS
    for use in facts["links"].values():
        assert set(use) == {"nbytes", "slices", "messages", "nbytes_mean_slice", "nbytes_mean_message"}
    assert {key: set(end) for key, end in facts["busiest"].items()} == {
        "slot_sends": {"slot", "node", "nbytes"},
        "slot_receives": {"slot", "node", "nbytes"},
        "node_sends": {"node", "nbytes"},
        "node_receives": {"node", "nbytes"},
    }


SLOW = ("llama3-70b", "llama3-405b")


@pytest.mark.parametrize("model", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in ZOO])
def test_every_model_of_the_zoo(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The largest is 1,024 to 1,536 GPUs. run_plan proves each plan."""
    facts = facts_of(PlanOptions(model, *RESIZES[model]), capsys)
    assert 0 < facts["nbytes_lower_bound"] <= facts["nbytes_moved"] < facts["nbytes_needed"]
    assert facts["nbytes_moved"] <= facts["nbytes_moved_if_rank_i_took_slot_i"] <= facts["nbytes_needed"]
    assert facts["nbytes_needed"] >= 14 * facts["parameters"]
    assert facts["largest_view_nbytes"] < 2**20
    assert facts["memory"]["nbytes_tight"] <= facts["memory"]["nbytes_safe"]


def test_stages_of_unequal_layers_are_listed_in_runs(capsys: pytest.CaptureFixture[str]) -> None:
    options = PlanOptions("llama3-405b", "tp=8,pp=16", "tp=8,pp=16,dp=2", "16x8,32x8")
    assert "TP8 PP16 DP2 ZeRO-1 layers 7-14x8-7, 256 ranks" in words_of(options, capsys)
    assert facts_of(options, capsys)["to"]["layers"] == [7, *[8] * 14, 7]


def test_a_model_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.yaml"
    sizes = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    path.write_text(yaml.safe_dump({**sizes, "position_embedding_type": "rope"}))
    facts = facts_of(replace(SMALL, model=str(path)), capsys)
    assert facts["nbytes_moved"] == facts["nbytes_lower_bound"] > 0


def test_nodes_that_leave_send_and_do_not_receive(capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of(SHRINK, capsys)
    assert int(facts["busiest"]["node_sends"]["node"].removeprefix("node")) >= 16
    assert int(facts["busiest"]["node_receives"]["node"].removeprefix("node")) < 16
    assert facts["idle_nodes"] == [f"node{node}" for node in range(16, 24)]
    assert "16x8 (128 GPUs), the last 8 leave" in words_of(SHRINK, capsys)


def test_nodes_to_give_back_are_chosen_so_that_less_moves(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = replace(SHRINK, choose_nodes=True)
    facts = facts_of(chosen, capsys)
    assert len(facts["idle_nodes"]) == 8
    assert facts["nbytes_moved"] < facts_of(SHRINK, capsys)["nbytes_moved"]
    assert f"given back: {' '.join(facts['idle_nodes'])}" in words_of(chosen, capsys)


@pytest.mark.parametrize(
    ("deadline_s", "fits_all", "fits_saved", "words"),
    [
        (60.0, True, True, "all of it fits into the 60 s of notice"),
        (0.001, False, False, "too short: what only leaving slots hold takes "),
    ],
)
def test_deadlines(
    deadline_s: float, fits_all: bool, fits_saved: bool, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = replace(SHRINK, deadline_s=deadline_s)
    assert f"deadline          {words}" in words_of(options, capsys)
    facts = facts_of(options, capsys)
    found = facts["deadline"]
    assert (found["fits_all"], found["fits_saved"]) == (fits_all, fits_saved)
    assert 0 < found["saved_s"] <= facts["predicted"]["wire_s"] <= found["total_s"] == facts["predicted"]["total_s"]


def test_speeds_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Links(nic_bytes_per_s=1e9, network_bytes_per_s=1e9).save(tmp_path / "slow.json")
    slow = facts_of(replace(GROW, links=tmp_path / "slow.json"), capsys)
    # A node is done when its busiest way is: out or in, at 1 GB/s.
    most = max(slow["busiest"][end]["nbytes"] for end in ("node_sends", "node_receives"))
    assert slow["predicted"]["wire_s"] == pytest.approx(most / 1e9, rel=0.1)
    assert slow["predicted"]["wire_s"] > 10 * facts_of(GROW, capsys)["predicted"]["wire_s"]


@pytest.mark.parametrize("mode", ["safe", "tight", None])
def test_which_mode_fits(mode: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    memory = facts_of(GROW, capsys)["memory"]
    nbytes = {"safe": memory["nbytes_safe"], "tight": memory["nbytes_tight"], None: memory["nbytes_tight"] - 1}[mode]
    options = replace(GROW, gpu_gib=6 + nbytes / 2**30)
    assert facts_of(options, capsys)["memory"]["mode"] == mode
    assert f"fits              {mode or 'neither mode'}" in words_of(options, capsys)


def test_page_with_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.html"
    text = words_of(replace(GROW, html=path), capsys)
    page = path.read_text()
    assert page.count("<svg") == page.count("</svg>") == 1
    assert not any(word in page for word in ("http", "<script", "<link", "src=", "url("))
    assert "color-scheme" in page
    assert text.splitlines()[0] in page
    assert "8 join" in page


def test_nothing_to_move(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = replace(GROW, target=GROW.source, nodes="16x8,16x8", html=tmp_path / "plan.html")
    text = words_of(options, capsys)
    assert "on the wire       0 B, the least possible" in text
    assert "busiest" not in text
    assert "<svg" not in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target": "tp=16,pp=4,dp=6"}, "num_query_groups=8 cannot be split by tp=16; use tp=2 or tp=4 or tp=8"),
        ({"target": "tp=8,pp=81"}, "num_layers=80 cannot fill pp=81 stages; use pp<=80"),
        ({"target": "tp=8,pp=4,dp=7"}, "8 x pp=4 x dp=7 = 224 ranks need as many GPUs; 24x8 are 192, enough for dp<=6"),
        ({"target": "tp=8,dp=8,ep=8"}, "ep=8, but the model has no experts; use ep=1"),
        ({"target": "tp=8,pp=2,layers=40-41"}, "pipeline_layers=(40, 41) are 81 layers; the model has 80"),
        ({"nodes": "32x4,48x4"}, "tp=8 does not fit on a node of 4 GPUs; use tp<=4"),
        ({"nodes": "16x8,12x16"}, "nodes of 8 and of 16 GPUs; use one size"),
        ({"nodes": "16x8"}, "--nodes 16x8 is not like 128x8,192x8"),
        ({"nodes": "16x8,0x8"}, "--nodes 16x8,0x8: use at least 1x1,1x1"),
        ({"target": "tp=8,sp=2"}, "'sp' is not one of tp, pp, dp, cp, ep, etp, vpp or layers, nor the word zero1 or"),
        ({"target": "tp=8,tp=4"}, "tp is given twice"),
        ({"source": "tp=0"}, "--from tp=0: tp=0 must be a whole number of at least 1"),
        ({"model": "llama4"}, "model 'llama4' is not known; use one of gpt3-1.3b"),
        ({"model": "none.yaml"}, "--model none.yaml: No such file or directory"),
        ({"staging_mib": 0}, "--staging-mib 0 must be at least 1"),
        ({"gpu_gib": 5.0}, "--gpu-gib 5 must be above 6, which contexts take"),
        ({"deadline_s": 0.0}, "--deadline-s 0 must be above 0 seconds"),
        ({"deadline_s": float("nan")}, "--deadline-s nan must be above 0 seconds"),
        ({"choose_nodes": True}, "--choose-nodes: of 16 nodes 24 stay, none leaves; leave it out"),
        ({"deadline_s": 9.0, "choose_nodes": True}, "--deadline-s 9 is for nodes that are told to leave"),
        ({"links": Path("none.json")}, "none.json is not a table of links"),
        ({"html": Path("no/such/folder.html")}, "--html no/such/folder.html: No such file or directory"),
        (
            {
                "model": "gpt3-175b",
                "source": "tp=6,dp=4",
                "target": "tp=6,dp=4",
                "nodes": "4x8,3x8",
                "choose_nodes": True,
            },
            "groups of 6 ranks need 4 nodes of 8 GPUs to be whole; --nodes leaves 3",
        ),
    ],
)
def test_refused_with_the_numbers(changed: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(replace(GROW, **changed)) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"speed": 1}', "is not a table of links"),
        ('{"nic_bytes_per_s": 0}', "nic_bytes_per_s=0 must be above 0 bytes per second"),
        ('{"message_s": -1}', "message_s=-1 must be at least 0"),
        ("[1]", "is not a table of links"),
    ],
)
def test_tables_of_links_that_are_none(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "links.json").write_text(content)
    assert run_plan(replace(SMALL, links=tmp_path / "links.json")) == 2
    assert message in capsys.readouterr().err


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


def test_experts_that_fill_a_node_stay_on_one() -> None:
    """EP8 to EP4 on nodes of 4: each group of four ranks holds all experts, and stays whole though that moves more."""
    options = PlanOptions("qwen3-30b-a3b", "dp=8,ep=8", "dp=8,ep=4", "2x4,2x4")
    model = load_model(options.model)
    before, after = (
        Side(model.settled(parse_parallel("--to", text)), 2, 4) for text in (options.source, options.target)
    )
    target = plan_between(options, model, before, after).plan.target
    for family, tensors in enumerate(target.families):
        if tensors[0].kind == "param" and tensors[0].expert_dim is not None:
            for node in (0, 1):
                here = (target.family == family) & (target.rank // 4 == node)
                assert set(target.offsets[here, 0].tolist()) == {0, 32, 64, 96}
