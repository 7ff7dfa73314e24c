"""Models from Megatron's own arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_etc.planners.model import ExpertShape, LatentShape, ModelShape
from ray_etc.planners.model_file import model_from_arguments
from ray_etc.planners.zoo import ZOO

LLAMA3_8B: dict[str, Any] = {
    "num-layers": 32,
    "hidden-size": 4096,
    "ffn-hidden-size": 14336,
    "num-attention-heads": 32,
    "group-query-attention": True,
    "num-query-groups": 8,
    "vocab-size": 128256,
    "swiglu": True,
    "untie-embeddings-and-output-weights": True,
    "disable-bias-linear": True,
    "normalization": "RMSNorm",
    "position-embedding-type": "rope",
}
DEEPSEEK_V3: dict[str, Any] = {
    "num_layers": 61,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "num_attention_heads": 128,
    "kv_channels": 128,
    "vocab_size": 129280,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "qk_layernorm": True,
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 256,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_layer_freq": "([0]*3+[1]*58)",
    "moe_router_enable_expert_bias": True,
    "mtp_num_layers": 1,
}


def test_with_dashes_or_underscores() -> None:
    assert model_from_arguments(LLAMA3_8B) == ZOO["llama3-8b"]
    assert model_from_arguments({k.replace("-", "_"): v for k, v in LLAMA3_8B.items()}) == ZOO["llama3-8b"]


def test_deepseek_v3_with_the_layer_that_predicts_a_second_token() -> None:
    assert model_from_arguments(DEEPSEEK_V3) == replace(ZOO["deepseek-v3"], mtp_layers=1)


def test_what_is_left_out_is_as_on_megatrons_command_line() -> None:
    """GPT-3 1.3B says little more than its sizes."""
    model = model_from_arguments(
        {
            "num_layers": 24,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "padded_vocab_size": 50257,
            "max_position_embeddings": 2048,
        }
    )
    assert model == ZOO["gpt3-1.3b"]
    swiglu = {"num_layers": 1, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 8, "swiglu": True}
    rotary = model_from_arguments({**swiglu, "position_embedding_type": "rope", "multi_latent_attention": True})
    assert rotary.ffn == 10880  # int((4 * 4096 * 2 / 3) / 64) * 64
    assert rotary.latent == LatentShape(None, 512)


@pytest.mark.parametrize(
    ("freq", "dense"),
    [(1, ()), (2, (1, 3, 5)), ("3", (1, 2, 4, 5)), ([0, 1, 1, 1, 1, 1], (0,)), ("([0]+[1]*2)*2", (0, 3))],
)
def test_which_layers_are_dense(freq: Any, dense: tuple[int, ...]) -> None:
    sizes = {"num_layers": 6, "num_experts": 8, "moe_ffn_hidden_size": 64, "moe_layer_freq": freq}
    model = model_from_arguments({**LLAMA3_8B, **sizes, "num-layers": 6} | sizes)
    assert model.experts == ExpertShape(8, 64, dense_layers=dense)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 4096}, "hidden: not an argument that shapes a model; use num_layers, hidden_size, .*"),
        ({"num-layers": None}, "num_layers must be given"),
        ({"vocab-size": None}, r"vocab_size \(or padded_vocab_size\) must be given"),
        ({"num-layers": "32"}, "num_layers='32' must be a whole number of at least 1"),
        ({"swiglu": "yes"}, "swiglu='yes' must be true or false"),
        ({"normalization": "L2"}, "normalization='L2' is not known; use one of LayerNorm, RMSNorm"),
        ({"position-embedding-type": None}, "max_position_embeddings must be given for position_embedding_type=.*"),
        ({"num-attention-heads": 48}, "hidden_size=4096 is no multiple of num_attention_heads=48; give kv_channels"),
        ({"num-query-groups": 5}, "num_attention_heads=32 is no multiple of num_query_groups=5"),
        ({"group-query-attention": False}, "group_query_attention=false and num_query_groups=8 .* leave .* out"),
        ({"add-bias-linear": True}, "add_bias_linear and disable_bias_linear say the same; give one of them"),
        ({"moe-layer-freq": 2}, "moe_layer_freq: of a model with experts; give num_experts too"),
        ({"kv-lora-rank": 2}, "kv_lora_rank: of multi_latent_attention, which is not set"),
        ({"num-experts": 8, "moe-layer-freq": "[0]*3+[1]"}, r"moe_layer_freq=\[0\]\*3\+\[1\] is of 4 layers; .*32"),
        ({"num-experts": 8, "moe-layer-freq": "exit()"}, r"moe_layer_freq='exit\(\)' must be a number of layers or .*"),
    ],
)
def test_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        model_from_arguments({**LLAMA3_8B, **change})


def test_biases_of_qkv_alone() -> None:
    model = model_from_arguments({**LLAMA3_8B, "add-qkv-bias": True})
    assert isinstance(model, ModelShape)
    biases = {t.name.split(".", 3)[-1] for t in model.tensors() if t.name.endswith("bias")}
    assert biases == {"self_attention.linear_qkv.bias"}
