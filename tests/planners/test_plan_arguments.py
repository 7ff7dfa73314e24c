"""Configurations and models as the command line gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from ray_etc.plan_arguments import check_room, load_model, parse_parallel
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.zoo import ZOO

LLAMA2_7B = {
    "num-layers": 32,
    "hidden-size": 4096,
    "ffn-hidden-size": 11008,
    "num-attention-heads": 32,
    "vocab-size": 32000,
    "swiglu": True,
    "untie-embeddings-and-output-weights": True,
    "disable-bias-linear": True,
    "normalization": "RMSNorm",
    "position-embedding-type": "rope",
}


@pytest.mark.parametrize(
    ("text", "parallel"),
    [
        ("tp=8,pp=4,dp=32", ParallelConfig(8, 4, 32)),
        ("dp=8,ep=4,etp=2,cp=2", ParallelConfig(1, 1, 8, False, True, 2, 4, 2)),
        ("pp=4,vpp=2,plain", ParallelConfig(1, 4, virtual_pipeline=2, distributed_optimizer=False)),
        ("pp=4,layers=7-8-8-7", ParallelConfig(1, 4, pipeline_layers=(7, 8, 8, 7))),
        ("fsdp,dp=8", ParallelConfig(data_parallel=8, fully_sharded=True)),
        ("zero1", ParallelConfig()),
    ],
)
def test_configurations(text: str, parallel: ParallelConfig) -> None:
    assert parse_parallel("--to", text) == parallel


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=8,sp=2", "'sp' is not one of tp, pp, dp, cp, ep, etp, vpp or layers, nor the word zero1 or plain or fsdp"),
        ("", "'' is not one of tp, .*"),
        ("tp=8,tp=4", "tp is given twice"),
        ("tp=0", "tp=0 must be a whole number of at least 1"),
        ("tp", "tp= must be a whole number of at least 1"),
        ("fsdp,plain", "fsdp and plain exclude each other"),
        ("pp=2,layers=7-x", "layers=7-x is not like layers=7-8-8-7, one number a stage"),
        ("pp=2,layers=7-8-7", r"pipeline_layers=\(7, 8, 7\) has 3 numbers; give 2, .*"),
        ("dp=96,ep=64", "tensor_parallel=1 x context_parallel=1 x data_parallel=96 = 96 ranks of a stage cannot .*"),
    ],
)
def test_configurations_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^--to {text}: {message}$"):
        parse_parallel("--to", text)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelConfig(8), "tp=8 does not fit on a node of 4 GPUs; use tp<=4"),
        (ParallelConfig(1, 1, 8, expert_tensor_parallel=8), "etp=8 does not fit on a node of 4 GPUs; use etp<=4"),
        (
            ParallelConfig(2, 1, 3, context_parallel=2),
            "tp=2 x cp=2 x pp=1 x dp=3 = 12 ranks need as many GPUs; 2x4 are 8, enough for dp<=2",
        ),
        (
            ParallelConfig(4, 4),
            "tp=4 x pp=4 x dp=1 = 16 ranks need as many GPUs; 2x4 are 8, too few for one replica",
        ),
    ],
)
def test_ranks_that_find_no_room(parallel: ParallelConfig, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_room(parallel, 2, 4)


def test_models_by_name_or_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(LLAMA2_7B))
    (tmp_path / "a.json").write_text(json.dumps(LLAMA2_7B))
    for text in ("llama2-7b", str(tmp_path / "a.yaml"), str(tmp_path / "a.json")):
        assert load_model(text) == ZOO["llama2-7b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.yaml", None, "No such file or directory"),
        ("a.yaml", "num_layers: 4", "hidden_size, num_attention_heads must be given"),
        ("a.yaml", "a: b: c", "mapping values are not allowed here .*"),
        ("a.json", "{", "Expecting property name .*"),
        ("a.json", "[]", "a mapping of Megatron's argument names, such as hidden_size: 4096"),
    ],
)
def test_files_that_say_no_model(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"^--model .*{name}(: | must be ){message}$"):
        load_model(str(tmp_path / name))
