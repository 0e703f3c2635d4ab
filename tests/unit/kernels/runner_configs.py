"""Small configurations of families, each of which has what kernels tell apart."""

from typing import Any

from worker_svc.core.config import ModelConfig, parse_config

FIELDS: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
CONFIG = parse_config(FIELDS, "config.json")
MULTIPLIERS = {
    "architectures": ["GraniteForCausalLM"],
    "attention_multiplier": 0.4,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "logits_scaling": 0.5,
}


QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 64,
    "mlp_only_layers": [0],
}
GLM4_MOE = {
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 0,
}

MINIMAX_M2 = {"architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 3}

GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 21,
}


LLAMA4 = {
    "architectures": ["Llama4ForCausalLM"],
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size_mlp": 80,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 21,
    "floor_scale": 8,
    "attn_scale": 0.3,
}


QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 64,
}
QWEN3_5 = {
    **{name: value for name, value in QWEN3_NEXT.items() if "expert" not in name and name != "moe_intermediate_size"},
    "architectures": ["Qwen3_5ForCausalLM"],
    "layer_types": ["full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_conv_kernel_dim": 3,
}


def changed(**changes: Any) -> ModelConfig:
    return parse_config({**FIELDS, **changes}, "config.json")


LLAMA = parse_config(
    {
        **FIELDS,
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "num_attention_heads": 4,
    },
    "config.json",
)
