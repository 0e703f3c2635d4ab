"""Folders of published Qwen3 sizes without weights: engines load them with random ones."""

import json
from pathlib import Path
from typing import Any

from bench.rig.checkpoint import write_tokenizer

_COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "eos_token_id": 151645,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
SIZES: dict[str, dict[str, Any]] = {
    "0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
}


def write_qwen3(directory: Path, size: str, **changes: Any) -> None:
    """The configuration of a size of `SIZES`, with `changes`, and a tokenizer in which every id has a text."""
    config = _COMMON | SIZES[size] | changes
    write_tokenizer(directory, config["vocab_size"])
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
