"""Tiny checkpoints with random weights, made and saved by transformers: one for each thing a family may do."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB_SIZE = 307
MAX_POSITIONS = 512
# What transformers calls their configurations and models.
_FAMILIES = {
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "exaone4": "Exaone4",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "glm": "Glm",
    "glm4": "Glm4",
    "glm4_moe": "Glm4Moe",
    "minimax_m2": "MiniMaxM2",
    "gpt_oss": "GptOss",
    "granite": "Granite",
    "granite_hybrid": "GraniteMoeHybrid",
    "granite_moe": "GraniteMoe",
    "llama": "Llama",
    "llama4": "Llama4",
    "ministral": "Ministral",
    "ministral3": "Ministral3",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "olmoe": "Olmoe",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "seed_oss": "SeedOss",
    "smollm3": "SmolLM3",
}
_CONFIGS = {
    "gemma3": "Gemma3TextConfig",
    "llama4": "Llama4TextConfig",
    "qwen3_5": "Qwen3_5TextConfig",
    "qwen3_5_moe": "Qwen3_5MoeTextConfig",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


MULTIPLIERS = {
    "attention_multiplier": 0.4,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "logits_scaling": 0.5,
}


LOCAL, FULL = "sliding_attention", "full_attention"
WINDOWS = {"sliding_window": 20, "layer_types": [LOCAL, FULL, LOCAL]}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA2 = {
    "head_dim": 24,
    "sliding_window": 20,
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 4.0,
}
GEMMA3 = {
    "head_dim": 24,
    "sliding_window": 20,
    "query_pre_attn_scalar": 12,
    "layer_types": [LOCAL, FULL, LOCAL],
    "rope_parameters": {
        LOCAL: {"rope_type": "default", "rope_theta": 100.0},
        FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
    },
}
UNTIED_CAPPED = {"tie_word_embeddings": False, "final_logit_softcapping": 3.0}
OLMO3 = {
    "sliding_window": 20,
    "layer_types": [LOCAL, FULL, LOCAL],
    "rope_parameters": {LOCAL: {"rope_type": "default", "rope_theta": 10000.0}, FULL: YARN},
}
GROWING = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 24,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.25, "factor": 1.5}
PHI4 = {
    "sliding_window": None,
    "original_max_position_embeddings": MAX_POSITIONS,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.2],
        "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        "original_max_position_embeddings": MAX_POSITIONS,
        "factor": 2.0,
    },
}

SHARED = {"shared_expert_intermediate_size": 80}
OF_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
GLM4_MOE = {
    **{name: value for name, value in OF_EXPERTS.items() if name != "num_experts"},
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "head_dim": 16,
}

MINIMAX_M2 = {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "rotary_dim": 8}

LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
MAGNITUDES = {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5}

GRANITE_4 = {
    **MULTIPLIERS,
    "layer_types": ["full_attention"] * 3,
    "num_local_experts": 0,
    "num_experts_per_tok": 3,
    "shared_intermediate_size": 80,
    "intermediate_size": 48,
}

GPT_OSS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "head_dim": 16,
    "sliding_window": 20,
    "layer_types": [LOCAL, FULL, LOCAL],
    "rope_parameters": {**YARN, "truncate": False},
}


LLAMA4 = {
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 80,
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 20,
    "floor_scale": 8,
    "attn_scale": 0.3,
    "rope_parameters": LLAMA3_ROPE,
}


STATE = "linear_attention"
DELTA_RULE = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": [STATE, FULL, STATE],
}
OF_QWEN3_5 = {
    **DELTA_RULE,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}


@dataclass(frozen=True)
class Variant:
    """A family and what differs from its plainest configuration."""

    name: str
    family: str
    options: dict[str, Any] = field(default_factory=dict)


VARIANTS = (
    Variant("llama_grouped", "llama"),
    Variant("llama_llama3_rope_tied", "llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    Variant("llama_biases", "llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    Variant(
        "llama_linear_rope_wide_heads",
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}, "head_dim": 24},
    ),
    Variant("qwen2_tied", "qwen2", {"tie_word_embeddings": True}),
    Variant("qwen2_one_kv_head", "qwen2", {"num_key_value_heads": 1}),
    Variant("qwen3_tied", "qwen3", {"tie_word_embeddings": True, "head_dim": 24}),
    Variant("qwen3_biases", "qwen3", {"attention_bias": True, "head_dim": 16}),
    Variant("mistral_window_of_the_context", "mistral", {"sliding_window": MAX_POSITIONS, "head_dim": 24}),
    Variant("phi3_packed", "phi3", {"sliding_window": None}),
    Variant("granite_multipliers", "granite", {**MULTIPLIERS, "tie_word_embeddings": True}),
    Variant("granite_biases", "granite", {**MULTIPLIERS, "attention_bias": True, "mlp_bias": True}),
    Variant("olmo2_norms_after", "olmo2"),
    Variant("olmo2_biases", "olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    Variant("mistral_short_window", "mistral", {"sliding_window": 20}),
    Variant("ministral3_growing_queries", "ministral3", {"head_dim": 24, "rope_parameters": GROWING}),
    Variant("ministral_windows_of_some_layers", "ministral", {**WINDOWS, "head_dim": 24}),
    Variant("gemma_tied", "gemma", {"head_dim": 24}),
    Variant("gemma2_caps_and_windows", "gemma2", GEMMA2),
    Variant("gemma3_two_ropes", "gemma3", GEMMA3),
    Variant("gemma3_untied_and_capped", "gemma3", {**GEMMA3, **UNTIED_CAPPED}),
    Variant("cohere_side_by_side", "cohere", {"logit_scale": 0.7}),
    Variant("cohere2_some_not_rotated", "cohere2", WINDOWS),
    Variant("cohere2_biases", "cohere2", {"attention_bias": True, "tie_word_embeddings": False}),
    Variant("glm_half_turns", "glm", {"head_dim": 16}),
    Variant("glm4_sandwich", "glm4", {"head_dim": 24, "attention_bias": True}),
    Variant("smollm3_some_not_rotated", "smollm3", {"no_rope_layers": [1, 0, 1]}),
    Variant("exaone4_windows", "exaone4", WINDOWS),
    Variant("exaone4_no_windows", "exaone4", {"sliding_window": None, "layer_types": [FULL] * 3}),
    Variant("seed_oss_biases", "seed_oss", {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True}),
    Variant("olmo3_stretched_global_layers", "olmo3", OLMO3),
    Variant("phi3_partial_longrope", "phi3", PHI4),
    Variant("qwen2_yarn", "qwen2", {"rope_parameters": YARN}),
    Variant("qwen3_proportional", "qwen3", {"head_dim": 24, "rope_parameters": PROPORTIONAL}),
    Variant("mixtral_window", "mixtral", {"num_local_experts": 4, "sliding_window": 20}),
    Variant("qwen2_moe_shared", "qwen2_moe", {**OF_EXPERTS, **SHARED}),
    Variant(
        "qwen2_moe_renormalised_windows",
        "qwen2_moe",
        {
            **OF_EXPERTS,
            **SHARED,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 2,
            "decoder_sparse_step": 2,
        },
    ),
    Variant("qwen3_moe_one_dense_layer", "qwen3_moe", {**OF_EXPERTS, "head_dim": 16, "mlp_only_layers": [1]}),
    Variant("qwen3_moe_renormalised", "qwen3_moe", {**OF_EXPERTS, "norm_topk_prob": True, "attention_bias": True}),
    Variant("olmoe", "olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 4}),
    Variant("glm4_moe_groups_and_correction", "glm4_moe", {**GLM4_MOE, "attention_bias": True, "use_qk_norm": True}),
    Variant("glm4_moe_plain_weights", "glm4_moe", {**GLM4_MOE, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    Variant("minimax_m2_half_turns", "minimax_m2", MINIMAX_M2),
    Variant("minimax_m2_tied", "minimax_m2", {**MINIMAX_M2, "rotary_dim": 16, "tie_word_embeddings": True}),
    Variant("deepseek_v2_groups", "deepseek_v2", {**LATENT, "topk_method": "group_limited_greedy"}),
    Variant("deepseek_v2_whole_queries", "deepseek_v2", {**LATENT, "q_lora_rank": None, "rope_parameters": MAGNITUDES}),
    Variant("deepseek_v3_biases", "deepseek_v3", {**LATENT, "attention_bias": True, "rope_parameters": MAGNITUDES}),
    Variant("deepseek_v3_halves_turn", "deepseek_v3", {**LATENT, "rope_interleave": False, "norm_topk_prob": False}),
    Variant("granite_moe_stacked", "granite_moe", {**MULTIPLIERS, "num_local_experts": 8, "num_experts_per_tok": 3}),
    Variant("granite_hybrid_experts", "granite_hybrid", {**GRANITE_4, "num_local_experts": 8}),
    Variant("granite_hybrid_dense_rotated", "granite_hybrid", {**GRANITE_4, "position_embedding_type": "rope"}),
    Variant("gpt_oss_sinks", "gpt_oss", GPT_OSS),
    Variant("llama4_chunks_and_temperature", "llama4", {**LLAMA4, "num_experts_per_tok": 3}),
    Variant(
        "llama4_some_dense",
        "llama4",
        {
            **LLAMA4,
            "interleave_moe_layer_step": 2,
            "rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0},
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
        },
    ),
    Variant("qwen3_next_states", "qwen3_next", {**DELTA_RULE, **OF_EXPERTS, **SHARED}),
    Variant(
        "qwen3_next_some_dense",
        "qwen3_next",
        {
            **DELTA_RULE,
            **OF_EXPERTS,
            **SHARED,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 2,
            "mlp_only_layers": [0],
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    Variant("qwen3_5_states", "qwen3_5", {**OF_QWEN3_5, "tie_word_embeddings": True}),
    Variant("qwen3_5_moe_states", "qwen3_5_moe", {**OF_QWEN3_5, **OF_EXPERTS, **SHARED}),
    Variant("llama_yarn_of_the_paper", "llama", {"rope_parameters": MAGNITUDES}),
)


COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_model(variant: Variant, seed: int = 0) -> PreTrainedModel:
    """A model in fp32 whose logits are spread out, so that greedy tokens do not hang on rounding."""
    name = _FAMILIES[variant.family]
    config_class = getattr(transformers, _CONFIGS.get(variant.family, f"{name}Config"))
    model_class = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(seed)
    config = config_class(**(COMMON | variant.options))
    config._attn_implementation = "eager"  # others leave out what they have no word for, such as a cap of scores
    return with_random_weights(model_class(config))


def with_random_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The model, each part of which shows in what it says."""
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms stay near what they begin as (one, or zero where one is added to them) and biases away from zero: a
            # part that is left out must show.
            parameter.normal_(float(parameter.flatten()[0]) if name.endswith("norm.weight") else 0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0.0, 0.2)
    return model


def save_checkpoint(directory: Path, variant: Variant, seed: int = 0, **save_options: Any) -> PreTrainedModel:
    """The model of `make_model`, saved into `directory` in the standard layout."""
    model = make_model(variant, seed)
    model.save_pretrained(directory, **save_options)
    return model


def save_rounded_checkpoint(directory: Path, variant: Variant, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The same with weights that are exact in `dtype`; the model is in fp32.

    `model.to(dtype)` would round the frequencies of the rotary embedding as well, which no engine does: after
    some hundred positions its angles are others.
    """
    model = make_model(variant)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    model.save_pretrained(directory)
    return model
