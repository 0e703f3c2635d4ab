"""Fields of a `config.json` that say nothing of what a model computes, as transformers and others write them."""

from typing import Any

# Whatever they say: where the checkpoint comes from, training, special tokens, the context's length, how transformers
# is to run it.
_NEUTRAL = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_commit_hash",
        "_experts_implementation",
        "_experts_implementation_internal",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "aux_loss_alpha",
        "attention_probs_dropout_prob",
        "attn_implementation",
        "auto_map",
        "bos_token",
        "bos_token_id",
        "cache_implementation",
        "classifier_dropout",
        "decoder_start_token_id",
        "dtype",
        "embd_pdrop",
        "embedding_dropout",
        "ep_size",
        "eos_token",
        "eos_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "hidden_dropout",
        "hidden_dropout_prob",
        "id2label",
        "init_method",
        "initializer_range",
        "is_decoder",
        "label2id",
        "license",
        "max_length",
        "max_position_embeddings",
        "min_length",
        "model_max_length",
        "model_type",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "residual_dropout",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sep_token_id",
        "seq_aux",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
        "use_flash_attn",
    ]
)
# Written out by older versions of transformers with the values that they had by default.
_DEFAULTS: dict[str, Any] = {
    "length_penalty": 1.0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
}


def says_nothing(field: str, value: Any) -> bool:
    """Return whether a field may be left unread: it is neutral, off, or has its default."""
    is_off = value is None or value is False or value in (0, "", [], {})
    return is_off or field in _NEUTRAL or (field in _DEFAULTS and _DEFAULTS[field] == value)
