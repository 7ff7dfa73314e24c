"""The zoo against what its models' authors published, and against Megatron's rules of splitting."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
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
    # Mixtures: parameters of the published checkpoints: 46.7, 30.5, 235 and 671 billion.
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    # Without the biases of its 58 routers, which the checkpoint counts among its 671,026,419,200.
    "deepseek-v3": 671_026_419_200 - 58 * 256,
}


def test_every_model_has_a_published_count() -> None:
    assert ZOO.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_published(name: str) -> None:
    tolerance = 0.01 if name.startswith("gpt3") else 0
    assert model_named(name).num_parameters == pytest.approx(PUBLISHED[name], rel=tolerance)


@pytest.mark.parametrize("name", ["gpt3-1.3b", "llama3-8b", "qwen3-30b-a3b"])
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


def test_a_mixture_layer_of_deepseek_v3() -> None:
    """Shapes of the published checkpoint, gate and up apart; the first three layers have an ordinary MLP."""
    tensors = ZOO["deepseek-v3"].tensors()
    layer = {
        t.name.removeprefix("decoder.layers.3."): (t.shape, t.split_dim, t.expert_dim)
        for t in tensors
        if (t.kind, t.layer) in (("param", 3), ("buffer", 3))
    }
    assert layer == {
        "input_layernorm.weight": ((7168,), None, None),
        "self_attention.linear_proj.weight": ((7168, 16384), 1, None),
        "self_attention.linear_q_down_proj.weight": ((1536, 7168), None, None),
        "self_attention.linear_q_up_proj.layer_norm_weight": ((1536,), None, None),
        "self_attention.linear_q_up_proj.weight": ((24576, 1536), 0, None),
        "self_attention.linear_kv_down_proj.weight": ((576, 7168), None, None),
        "self_attention.linear_kv_up_proj.layer_norm_weight": ((512,), None, None),
        "self_attention.linear_kv_up_proj.weight": ((32768, 512), 0, None),
        "pre_mlp_layernorm.weight": ((7168,), None, None),
        "mlp.router.weight": ((256, 7168), None, None),
        "mlp.router.expert_bias": ((256,), None, None),
        "mlp.experts.experts.linear_fc1.weight_v": ((256, 2048, 7168), 1, 0),
        "mlp.experts.experts.linear_fc1.weight_w": ((256, 2048, 7168), 1, 0),
        "mlp.experts.experts.linear_fc2.weight": ((256, 7168, 2048), 2, 0),
        "mlp.shared_experts.linear_fc1.weight_v": ((2048, 7168), 0, None),
        "mlp.shared_experts.linear_fc1.weight_w": ((2048, 7168), 0, None),
        "mlp.shared_experts.linear_fc2.weight": ((7168, 2048), 1, None),
    }
    assert {t.layer for t in tensors if "router" in t.name} == set(range(3, 61))
    assert {t.kind for t in tensors if "expert_bias" in t.name} == {"buffer"}


def test_multi_token_prediction_reads_the_embedding_on_the_last_stage() -> None:
    """Published as "11.5B unique parameters, excluding the shared 0.9B embedding and 0.9B output head"."""
    plain = ZOO["deepseek-v3"]
    model = replace(plain, mtp_layers=1)
    assert model.num_parameters - plain.num_parameters == pytest.approx(11.5e9, rel=0.01)
    extra = {t.name: t.layer for t in model.tensors()}.keys() - {t.name for t in plain.tensors()}
    assert all(name.startswith("mtp.layers.0.") for name in extra)
    layers = [t.layer for t in model.tensors(8) if t.key == ("param", "embedding.word_embeddings.weight")]
    assert layers == [-1, 61]


@pytest.mark.parametrize(
    ("name", "parallel", "layers"),
    [
        ("llama3-405b", ParallelConfig(8, 16), (7, *[8] * 14, 7)),
        ("llama3-405b", ParallelConfig(8, 16, virtual_pipeline=2), (3, *[4] * 30, 3)),
        ("llama3-70b", ParallelConfig(8, 3), (27, 27, 26)),
        ("deepseek-v3", ParallelConfig(1, 8), (7, 8, 8, 8, 8, 8, 7, 7)),
        ("llama3-70b", ParallelConfig(8, 4), None),
        ("llama3-8b", ParallelConfig(1, 2, pipeline_layers=(20, 12)), (20, 12)),
    ],
)
def test_ends_of_the_pipeline_get_fewer_layers(
    name: str, parallel: ParallelConfig, layers: tuple[int, ...] | None
) -> None:
    assert model_named(name).settled(parallel).pipeline_layers == layers


@pytest.mark.parametrize(
    ("name", "parallel", "message"),
    [
        ("llama3-70b", ParallelConfig(16, 4), "num_query_groups=8 cannot be split by tp=16; use tp=2 or tp=4 or tp=8"),
        ("llama2-13b", ParallelConfig(3), "num_query_groups=40 cannot be split by tp=3; use tp=1 or tp=2 or tp=4"),
        ("deepseek-v3", ParallelConfig(256), "num_attention_heads=128 cannot be split by tp=256; use .*tp=128"),
        ("llama3-70b", ParallelConfig(8, 81), "num_layers=80 cannot fill pp=81 stages; use pp<=80"),
        (
            "llama3-70b",
            ParallelConfig(8, 20, virtual_pipeline=5),
            "num_layers=80 cannot fill pp=20 stages of vpp=5 chunks; use pp<=16",
        ),
        (
            "llama3-70b",
            ParallelConfig(8, 2, pipeline_layers=(40, 41)),
            r"pipeline_layers=\(40, 41\) are 81 layers; the model has 80",
        ),
        (
            "qwen3-30b-a3b",
            ParallelConfig(1, 1, 48, expert_parallel=48),
            "num_experts=128 cannot be split by ep=48; use ep=8 or ep=16 or ep=32 or ep=64",
        ),
        (
            "qwen3-30b-a3b",
            ParallelConfig(1, 1, 9, expert_tensor_parallel=9),
            "moe_ffn=768 cannot be split by etp=9; use etp=4 or etp=6 or etp=8 or etp=12",
        ),
        ("llama3-8b", ParallelConfig(1, 1, 8, expert_parallel=8), "ep=8, but the model has no experts; use ep=1"),
        (
            "llama3-8b",
            ParallelConfig(2, 1, 8, expert_tensor_parallel=1),
            "etp=1, but the model has no experts; leave etp out",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_numbers(name: str, parallel: ParallelConfig, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        model_named(name).check(parallel)


def test_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"use one of gpt3-1\.3b, .*llama3-405b"):
        model_named("gpt5")
