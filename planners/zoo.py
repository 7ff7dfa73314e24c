"""Public models as data: their shapes by the name that the command line takes."""

from __future__ import annotations

from ray_etc.planners.model import OPTIMIZER_KINDS, ExpertShape, LatentShape, ModelShape

__all__ = ["OPTIMIZER_KINDS", "ZOO", "ModelShape", "model_named"]


def _gpt3(num_layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(
        num_layers,
        hidden,
        4 * hidden,
        heads,
        heads,
        50257,
        positions=2048,
        gated=False,
        tied=True,
        biases=True,
        norm_biases=True,
    )


ZOO: dict[str, ModelShape] = {
    # Brown et al., arXiv 2005.14165, table 2.1. Its 24 heads of 128 for 1.3B do not make its width of 2048: 16 do.
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "gpt3-175b": _gpt3(96, 12288, 96),
    # Touvron et al., arXiv 2307.09288, and the config.json of each checkpoint.
    "llama2-7b": ModelShape(32, 4096, 11008, 32, 32, 32000),
    "llama2-13b": ModelShape(40, 5120, 13824, 40, 40, 32000),
    "llama2-70b": ModelShape(80, 8192, 28672, 64, 8, 32000),
    # Llama team, arXiv 2407.21783, table 3.
    "llama3-8b": ModelShape(32, 4096, 14336, 32, 8, 128256),
    "llama3-70b": ModelShape(80, 8192, 28672, 64, 8, 128256),
    "llama3-405b": ModelShape(126, 16384, 53248, 128, 8, 128256),
    # Jiang et al., arXiv 2401.04088, table 1.
    "mixtral-8x7b": ModelShape(32, 4096, 14336, 32, 8, 32000, experts=ExpertShape(8, 14336)),
    # Qwen team, arXiv 2505.09388, table 2, and the config.json of each checkpoint.
    "qwen3-30b-a3b": ModelShape(48, 2048, 6144, 32, 4, 151936, qk_norms=True, experts=ExpertShape(128, 768)),
    "qwen3-235b-a22b": ModelShape(94, 4096, 12288, 64, 4, 151936, qk_norms=True, experts=ExpertShape(128, 1536)),
    # DeepSeek-AI, arXiv 2412.19437, section 4.2: three dense layers, then 256 experts and a shared one a layer. The
    # layer that predicts a second token (mtp_layers=1) is not included: the published 671B are without it too.
    "deepseek-v3": ModelShape(
        61,
        7168,
        18432,
        128,
        128,
        129280,
        qk_norms=True,
        experts=ExpertShape(256, 2048, shared_ffn=2048, dense_layers=(0, 1, 2), router_bias=True),
        latent=LatentShape(q_rank=1536, kv_rank=512),
    ),
}
"""Model shapes by the name that the command line takes."""


def model_named(name: str) -> ModelShape:
    """The model of the zoo called `name`; ValueError lists the names there are."""
    if name not in ZOO:
        raise ValueError(f"model {name!r} is not known; use one of {', '.join(ZOO)}")
    return ZOO[name]
