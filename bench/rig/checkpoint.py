"""A checkpoint for the simulated runner: a tokenizer in which every token is a word of its own, and no weights."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 8192
MAX_MODEL_LEN = 65_536


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Byte-level, as the tokenizers of Llama 3 and Qwen are; each token has text, so each step has an event."""
    words = {f"Ġw{token_id:04}": token_id for token_id in range(vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def write_checkpoint(directory: Path) -> None:
    """A configuration and the tokenizer."""
    write_tokenizer(directory, VOCAB_SIZE)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": MAX_MODEL_LEN,
    }
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
