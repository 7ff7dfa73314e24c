"""A model given by Megatron's own argument names, with what Megatron takes where one is left out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ray_etc.planners.model import ExpertShape, LatentShape, ModelShape

NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
SHAPING = (
    *NEEDED,
    "vocab_size",
    "padded_vocab_size",
    "ffn_hidden_size",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "add_bias_linear",
    "disable_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "normalization",
    "position_embedding_type",
    "max_position_embeddings",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_layer_freq",
    "moe_router_enable_expert_bias",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "mtp_num_layers",
)
"""The arguments that are understood."""


def model_from_arguments(arguments: Mapping[str, Any]) -> ModelShape:
    """The model that Megatron builds from `arguments`, whose names may have dashes for underscores.

    What is left out is as on Megatron's command line: LayerNorm, biases, learned positions and a tied output. Raises
    ValueError, naming the argument, for one that is not understood, is missing or is of the wrong form.
    """
    given = {str(name).replace("-", "_"): value for name, value in arguments.items()}
    if unknown := sorted(given.keys() - set(SHAPING)):
        raise ValueError(f"{', '.join(unknown)}: not an argument that shapes a model; use {', '.join(SHAPING)}")
    if missing := [name for name in NEEDED if given.get(name) is None]:
        raise ValueError(f"{', '.join(missing)} must be given")
    return _Reader(given).model()


class _Reader:
    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = {name: value for name, value in given.items() if value is not None}

    def model(self) -> ModelShape:
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        gated = self.flag("swiglu")
        if "kv_channels" not in self.given and hidden % heads:
            raise ValueError(f"hidden_size={hidden} is no multiple of num_attention_heads={heads}; give kv_channels")
        ffn = self.size("ffn_hidden_size", hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden)
        if "add_bias_linear" in self.given and "disable_bias_linear" in self.given:
            raise ValueError("add_bias_linear and disable_bias_linear say the same; give one of them")
        biases = not self.flag("disable_bias_linear") if "disable_bias_linear" in self.given else None
        return ModelShape(
            num_layers=self.size("num_layers"),
            hidden=hidden,
            ffn=ffn,
            num_attention_heads=heads,
            num_query_groups=self.query_groups(heads),
            vocab=self.vocabulary(),
            kv_channels=self.size("kv_channels", hidden // heads),
            positions=self.positions(),
            gated=gated,
            tied=not self.flag("untie_embeddings_and_output_weights"),
            biases=self.flag("add_bias_linear", True) if biases is None else biases,
            norm_biases=self.choice("normalization", ("LayerNorm", "RMSNorm")) == "LayerNorm",
            qkv_biases=self.flag("add_qkv_bias"),
            qk_norms=self.flag("qk_layernorm"),
            experts=self.experts(ffn),
            latent=self.latent(),
            mtp_layers=self.size("mtp_num_layers", 0, least=0),
        )

    def query_groups(self, heads: int) -> int:
        groups = self.size("num_query_groups", heads)
        if heads % groups:
            raise ValueError(f"num_attention_heads={heads} is no multiple of num_query_groups={groups}")
        if self.flag("group_query_attention", groups != heads) != (groups != heads):
            said = str(self.given["group_query_attention"]).lower()
            raise ValueError(
                f"group_query_attention={said} and num_query_groups={groups} of num_attention_heads={heads} contradict "
                "each other; leave group_query_attention out"
            )
        return groups

    def vocabulary(self) -> int:
        """Rows without padding where they are given: padding depends on the configuration, and is never moved."""
        if "vocab_size" not in self.given and "padded_vocab_size" not in self.given:
            raise ValueError("vocab_size (or padded_vocab_size) must be given")
        return self.size("vocab_size" if "vocab_size" in self.given else "padded_vocab_size")

    def positions(self) -> int:
        kind = self.choice("position_embedding_type", ("learned_absolute", "rope", "mrope", "yarn", "none"))
        if kind != "learned_absolute":
            return 0
        if "max_position_embeddings" not in self.given:
            raise ValueError(
                "max_position_embeddings must be given for position_embedding_type=learned_absolute, Megatron's "
                "default; or use position_embedding_type=rope"
            )
        return self.size("max_position_embeddings")

    def experts(self, ffn: int) -> ExpertShape | None:
        if "num_experts" not in self.given:
            if of_experts := sorted(name for name in self.given if name.startswith("moe_")):
                raise ValueError(f"{', '.join(of_experts)}: of a model with experts; give num_experts too")
            return None
        return ExpertShape(
            self.size("num_experts"),
            self.size("moe_ffn_hidden_size", ffn),
            shared_ffn=self.size("moe_shared_expert_intermediate_size", 0, least=0),
            dense_layers=self.dense_layers(),
            router_bias=self.flag("moe_router_enable_expert_bias"),
            shared_gate=self.flag("moe_shared_expert_gate"),
        )

    def dense_layers(self) -> tuple[int, ...]:
        """From 1 for each mixture and 0 for each dense layer, or N for a mixture every N layers from the first on."""
        layers, given = self.size("num_layers"), self.given.get("moe_layer_freq", 1)
        pattern = _pattern(given)
        if isinstance(pattern, int):
            pattern = [int(layer % pattern == 0) for layer in range(layers)]
        if len(pattern) != layers:
            raise ValueError(f"moe_layer_freq={given} is of {len(pattern)} layers; num_layers={layers}")
        return tuple(layer for layer, is_mixture in enumerate(pattern) if not is_mixture)

    def latent(self) -> LatentShape | None:
        names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        if not self.flag("multi_latent_attention"):
            if stray := [name for name in names if name in self.given]:
                raise ValueError(f"{', '.join(stray)}: of multi_latent_attention, which is not set")
            return None
        return LatentShape(
            q_rank=self.size("q_lora_rank") if "q_lora_rank" in self.given else None,
            kv_rank=self.size("kv_lora_rank", 512),
            qk_head=self.size("qk_head_dim", 128),
            qk_rotary=self.size("qk_pos_emb_head_dim", 64),
            v_head=self.size("v_head_dim", 128),
        )

    def size(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.given.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.given.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be true or false")
        return value

    def choice(self, name: str, known: tuple[str, ...]) -> str:
        """One of `known`, of which the first is the default."""
        value = self.given.get(name, known[0])
        if value not in known:
            raise ValueError(f"{name}={value!r} is not known; use one of {', '.join(known)}")
        return str(value)


def _pattern(value: Any) -> int | list[int]:
    """A number of layers, or ones and zeros: as a list, or as Megatron writes it, `[0]*3+[1]*58` or `([1]+[0])*2`."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, list) and all(one in (0, 1) for one in value):
        return value
    text = re.sub(r"\s", "", value) if isinstance(value, str) else ""
    if re.fullmatch(r"[1-9]\d*", text):
        return int(text)
    lists = r"\[[01](?:,[01])*\](?:\*\d+)?"
    if match := re.fullmatch(rf"\(({lists}(?:\+{lists})*)\)(?:\*(\d+))?|({lists}(?:\+{lists})*)", text):
        inner, times, plain = match.groups()
        ones: list[int] = []
        for numbers, repeats in re.findall(r"\[([01,]+)\](?:\*(\d+))?", inner or plain):
            ones += [int(one) for one in numbers.split(",")] * int(repeats or 1)
        return ones * int(times or 1)
    raise ValueError(f"moe_layer_freq={value!r} must be a number of layers or a pattern such as '[0]*3+[1]*58'")
