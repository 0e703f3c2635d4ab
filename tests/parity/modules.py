"""Tiny checkpoints of decoders that no family of ours describes."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from checkpoints import COMMON
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from worker_svc.core.transformers_models.tiny import randomize

MAX_POSITIONS = 320
LOCAL, FULL = "sliding_attention", "full_attention"
_GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": MAX_POSITIONS}
_MLA = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


@dataclass(frozen=True)
class Decoder:
    """A configuration of transformers' and its options."""

    name: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)

    def make_config(self) -> PreTrainedConfig:
        kind = getattr(transformers, f"{self.config}Config")
        config: PreTrainedConfig = kind(**(COMMON | {"max_position_embeddings": MAX_POSITIONS} | self.options))
        return config


# What they have beside each other: learned positions with and without an offset, one key for all heads, partial
# rotations, blocks side by side, layer norms with and without biases, heads' own norms, norms of whole projections,
# windows, values narrower than keys, several kinds of experts, factors for scores, residuals and logits.
DECODERS = (
    Decoder("gpt2", "GPT2", _GPT2),
    Decoder("gpt_bigcode_one_key", "GPTBigCode", {**_GPT2, "multi_query": True}),
    Decoder("gpt_neox_partial", "GPTNeoX", {"rotary_pct": 0.25}),
    Decoder("opt", "OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    Decoder("opt_projected", "OPT", {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    Decoder("phi_partial", "Phi", {"partial_rotary_factor": 0.5}),
    Decoder("stablelm_heads_norms", "StableLm", {"qk_layernorm": True, "use_parallel_residual": True}),
    Decoder("starcoder2_window", "Starcoder2", {"sliding_window": 20}),
    Decoder("persimmon", "Persimmon", {"qk_layernorm": True}),
    Decoder("nemotron", "Nemotron", {"head_dim": 16, "hidden_act": "relu2"}),
    Decoder("olmo_clipped", "Olmo", {"clip_qkv": 1.5}),
    Decoder("helium", "Helium", {"head_dim": 16}),
    Decoder("ernie", "Ernie4_5", {"head_dim": 16}),
    Decoder("arcee", "Arcee", {"head_dim": 16}),
    Decoder("minicpm3_latent", "MiniCPM3", {**_MLA, "num_key_value_heads": 4}),
    Decoder("dots1_windows", "Dots1", {**_EXPERTS, "head_dim": 16, "sliding_window": 20, "max_window_layers": 1}),
    Decoder(
        "vaultgemma_caps",
        "VaultGemma",
        {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 1.5},
    ),
    Decoder("diffllama_pairs", "DiffLlama", {}),
)

_OF_CHUNKS = {"num_local_experts": 4, "intermediate_size_mlp": 96, "attention_chunk_size": 16, "head_dim": 16}
_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "linear_attention", FULL],
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
# With what the message says of each.
REFUSED = (
    (Decoder("bloom", "Bloom", {"n_layer": 3, "n_head": 4}), "has attention of its own"),
    (Decoder("mpt", "Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 3}), "has attention of its own"),
    (Decoder("falcon", "Falcon", {"alibi": False}), "does not attend by transformers' attention functions"),
    (Decoder("gptj", "GPTJ", {**_GPT2, "rotary_dim": 8}), "does not attend by transformers' attention functions"),
    (Decoder("llama4_chunks", "Llama4Text", _OF_CHUNKS), "in chunks"),
    (Decoder("qwen3_next_state", "Qwen3Next", _DELTA), "layers.0.linear_attn .* keeps state"),
    (Decoder("lfm2_convolution", "Lfm2", {"layer_types": ["conv", FULL, "conv"]}), "layers.0.conv .* keeps state"),
    (Decoder("mamba", "Mamba"), "computes its layers from"),
    (Decoder("dynamic_rope", "Arcee", {"rope_parameters": _DYNAMIC}), "differs over paged attention"),
    (Decoder("bart_counts_by_itself", "Bart", {"d_model": 64}), "differs over paged attention"),
)


def make_module(decoder: Decoder) -> PreTrainedModel:
    """An eager model in fp32, of which every part counts."""
    module: PreTrainedModel = AutoModelForCausalLM.from_config(decoder.make_config(), attn_implementation="eager")
    randomize(module)
    return module.eval()


def save_module(directory: Path, decoder: Decoder) -> PreTrainedModel:
    """The model of `make_module`, saved into `directory`."""
    module = make_module(decoder)
    module.save_pretrained(directory)
    return module


def save_config(directory: Path, decoder: Decoder, **changes: Any) -> None:
    """A checkpoint without weights."""
    config = decoder.make_config()
    with_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    config.architectures = [with_class]
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(directory)
