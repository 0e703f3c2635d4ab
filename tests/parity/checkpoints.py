"""Tiny checkpoints with random weights, made and saved by transformers: one for each thing a family may do."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 307
MAX_POSITIONS = 512
_FAMILIES = {
    "granite": (GraniteConfig, GraniteForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
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
)


def make_model(variant: Variant, seed: int = 0) -> PreTrainedModel:
    """A model in fp32 whose logits are spread out, so that greedy tokens do not hang on rounding."""
    config_class, model_class = _FAMILIES[variant.family]
    options = {
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
        **variant.options,
    }
    torch.manual_seed(seed)
    model = model_class(config_class(**options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms stay near one and biases away from zero: a part that is left out must show.
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
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
