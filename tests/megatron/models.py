"""Models as a user of Megatron-core makes them: Megatron's own arguments, and a few of `Trainee`'s, as small as they
come."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

SEQUENCE, MICRO_BATCH_SIZE = 24, 2

BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 24,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "attention_softmax_in_fp32": True,
}

LLAMA: dict[str, Any] = {
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
}
GPT2: dict[str, Any] = {"position": "learned_absolute", "is_tied": True, "vocab_size": 31}
EXPERTS: dict[str, Any] = {
    **LLAMA,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 12,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}
LATENT: dict[str, Any] = {
    **LLAMA,
    "num_query_groups": None,
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 4,
    "qk_layernorm": True,
    "rope_type": "rope",
}
# Words without padding: the loss of these is computed in the model, and that of Megatron trains padding too.
HEADS: dict[str, Any] = {"mtp_num_layers": 1, "vocab_size": 32}

MODELS: dict[str, dict[str, Any]] = {
    # Grouped queries, SwiGLU, RMSNorm, rotary positions, no biases, and a vocabulary that no axis divides.
    "llama": LLAMA,
    "llama, QK norms and biases": {**LLAMA, "qk_layernorm": True, "add_qkv_bias": True},
    "llama, gates and sinks": {**LLAMA, "attention_output_gate": True, "softmax_type": "learnable"},
    "llama, six heads": {**LLAMA, "num_attention_heads": 6, "hidden_size": 24, "num_query_groups": 6},
    # Every head its own keys, a plain MLP, LayerNorm, biases, learned positions, tied embeddings.
    "gpt2": GPT2,
    "gpt2, no biases": {**GPT2, "add_bias_linear": False},
    "gpt2, SwiGLU with biases": {**GPT2, "gated_linear_unit": True, "activation_func": F.silu},
    "latent attention": LATENT,
    "latent attention, whole queries": {**LATENT, "q_lora_rank": None, "qk_layernorm": False},
    "experts": EXPERTS,
    "experts, grouped by a stand-in of Transformer Engine's": {**EXPERTS, "is_grouped": True},
    "experts, plain": {**EXPERTS, "gated_linear_unit": False, "activation_func": F.gelu, "normalization": "LayerNorm"},
    "experts, biased router": {
        **EXPERTS,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "experts, balanced by quantiles": {
        **EXPERTS,
        "moe_router_load_balancing_type": "quantile_balancing",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_quantile_balancing_ema": 0.5,
    },
    "experts, balanced over the batch": {
        **EXPERTS,
        "moe_router_load_balancing_type": ["global_aux_loss", "aux_loss"],
        "moe_aux_loss_coeff": [1e-2, 1e-2],
        "moe_z_loss_coeff": 1e-3,
    },
    "experts, balanced by sequence": {**EXPERTS, "moe_router_load_balancing_type": "seq_aux_loss"},
    "experts, shared too": {**EXPERTS, "moe_shared_expert_intermediate_size": 20},
    "experts, shared by a gate": {
        **EXPERTS,
        "moe_shared_expert_intermediate_size": 20,
        "moe_shared_expert_gate": True,
    },
    "experts with biases": {**EXPERTS, "add_bias_linear": True},
    "experts in some layers": {**EXPERTS, "moe_layer_freq": [0, 1, 1, 0]},
    "deepseek": {
        **EXPERTS,
        **LATENT,
        "moe_layer_freq": [0, 1],
        "moe_shared_expert_intermediate_size": 12,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        **HEADS,
    },
    "hybrid": {**LLAMA, "num_layers": 4, "hybrid_layer_pattern": "*-*-"},
    "hybrid with experts": {
        **EXPERTS,
        "num_layers": 4,
        "hybrid_layer_pattern": "*-*E",
        "moe_layer_freq": [0, 0, 0, 1],
    },
    "hybrid with a stand-in of Mamba's scan": {
        **LLAMA,
        "num_layers": 4,
        "hybrid_layer_pattern": "M*M-",
        "mamba_state_dim": 3,
        "mamba_head_dim": 8,
        "mamba_num_groups": 2,
    },
    "hybrid with a stand-in of fla's gated delta nets": {
        **LLAMA,
        "num_layers": 4,
        "hybrid_layer_pattern": "G*G-",
        "deterministic_mode": True,
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "hybrid with latent attention": {**LATENT, "num_layers": 4, "hybrid_layer_pattern": "+-+-"},
    "hybrid with two heads": {**LLAMA, **HEADS, "num_layers": 4, "hybrid_layer_pattern": "*-*-/*-"},
    "hybrid with three heads": {
        **LLAMA,
        **HEADS,
        "mtp_num_layers": 2,
        "num_layers": 4,
        "hybrid_layer_pattern": "*-*-/*-/*-",
    },
    "two heads": {**LLAMA, **HEADS},
    "three heads": {**LLAMA, **HEADS, "mtp_num_layers": 2},
    "two heads, tied": {**LLAMA, **HEADS, "is_tied": True},
}


OPTIMIZER: dict[str, Any] = {"optimizer": "adam", "lr": 1e-2, "min_lr": 1e-3, "weight_decay": 0.01, "clip_grad": 1.0}
