"""The zoo against what its models' authors published, and against Megatron's rules of splitting."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest

from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.zoo import ZOO, model_named

PUBLISHED = {
    # GPT-3: table D.1 of arXiv 2005.14165, in millions. Llama: parameters of the published checkpoints.
    "gpt3-1.3b": 1_320e6,
    "gpt3-6.7b": 6_660e6,
    "gpt3-175b": 174_600e6,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}


def test_every_model_has_a_published_count() -> None:
    assert ZOO.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_published(name: str) -> None:
    tolerance = 0.01 if name.startswith("gpt3") else 0
    assert model_named(name).num_parameters == pytest.approx(PUBLISHED[name], rel=tolerance)


@pytest.mark.parametrize("name", ["gpt3-1.3b", "llama3-8b"])
def test_state_is_14_bytes_a_parameter(name: str) -> None:
    model = model_named(name)
    nbytes: Counter[str] = Counter()
    for tensor in model.tensors():
        nbytes[tensor.kind] += prod(tensor.shape) * tensor.itemsize
    count = model.num_parameters
    assert nbytes == {"param": 2 * count, "main_param": 4 * count, "exp_avg": 4 * count, "exp_avg_sq": 4 * count}


@pytest.mark.parametrize("name", ZOO)
def test_names_are_unique_but_for_a_tied_output_on_the_last_stage(name: str) -> None:
    model = model_named(name)
    assert max(Counter(tensor.key for tensor in model.tensors()).values()) == 1
    twice = {name for (_, name), n in Counter(tensor.key for tensor in model.tensors(2)).items() if n > 1}
    assert twice == ({"embedding.word_embeddings.weight"} if model.tied else set())


def test_one_layer_of_llama3_8b() -> None:
    tensors = [tensor for tensor in ZOO["llama3-8b"].tensors() if (tensor.kind, tensor.layer) == ("param", 7)]
    layer = {t.name.removeprefix("decoder.layers.7."): (t.shape, t.split_dim) for t in tensors}
    assert layer == {
        "self_attention.linear_qkv.layer_norm_weight": ((4096,), None),
        "self_attention.linear_proj.weight": ((4096, 4096), 1),
        "self_attention.linear_qkv.weight": ((6144, 4096), 0),
        "mlp.linear_fc1.layer_norm_weight": ((4096,), None),
        "mlp.linear_fc1.weight_w": ((14336, 4096), 0),
        "mlp.linear_fc1.weight_v": ((14336, 4096), 0),
        "mlp.linear_fc2.weight": ((4096, 14336), 1),
    }


@pytest.mark.parametrize(
    ("name", "parallel", "message"),
    [
        ("llama3-70b", ParallelConfig(16, 4), "num_query_groups=8 cannot be split by tp=16; use tp=2 or tp=4 or tp=8"),
        ("llama2-13b", ParallelConfig(3), "num_query_groups=40 cannot be split by tp=3; use tp=1 or tp=2 or tp=4"),
        ("llama3-70b", ParallelConfig(8, 3), "num_layers=80 cannot be split by pp=3; use pp=1 or pp=2 or pp=4"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_numbers(name: str, parallel: ParallelConfig, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        model_named(name).check(parallel)


def test_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"use one of gpt3-1\.3b, .*llama3-405b"):
        model_named("gpt5")
