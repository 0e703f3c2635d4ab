"""English text and a tokenizer for it, made of what every Python brings along."""

import json
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 8192


def prose() -> str:
    """About half a million characters: the language reference that `help()` shows."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of that text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(prose().splitlines(keepends=True), trainer)
    return tokenizer


def write_checkpoint(path: Path, max_model_len: int = 1 << 20) -> Path:
    """The text files of a checkpoint with that tokenizer."""
    train_tokenizer().save(str(path / "tokenizer.json"))
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": max_model_len, "eos_token_id": 0}
    (path / "config.json").write_text(json.dumps(config))
    return path
