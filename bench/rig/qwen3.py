"""Folders of published Qwen3 sizes without weights: engines load them with random ones."""

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.rig.checkpoint import write_tokenizer

HEAD_DIM = 128
NUM_KV_HEADS = 8
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_TRAINED = 32_000  # entries of the trained tokenizer before the special ones
_NUM_SOURCES = 1500
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Size:
    """A model's dimensions."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    has_tied_head: bool
    vocab_size: int = 151_936

    @property
    def head_parameters(self) -> int:
        """Read in every step, used only for tokens that are sampled."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Read in every step: all layers' matrices and the head."""
        attention = self.hidden_size * HEAD_DIM * (2 * self.num_heads + 2 * NUM_KV_HEADS)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size) + self.head_parameters

    @property
    def kv_bytes(self) -> int:
        """Of one token, in bf16."""
        return self.num_layers * 2 * NUM_KV_HEADS * HEAD_DIM * 2


SIZES = {
    "0.6b": Size(1024, 28, 16, 3072, has_tied_head=True),
    "8b": Size(4096, 36, 32, 12288, has_tied_head=False),
    # The layers of 0.6b, and a vocabulary in which every id is one of a tokenizer that was trained on text.
    "v32k": Size(1024, 28, 16, 3072, has_tied_head=True, vocab_size=NUM_TRAINED + len(SPECIAL_TOKENS)),
}


def write_qwen3(directory: Path, name: str) -> None:
    """The configuration of one of `SIZES` and a tokenizer in which every id has a text."""
    size = SIZES[name]
    is_trained = name == "v32k"
    eos_token_id = NUM_TRAINED + 2 if is_trained else 151_645
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": NUM_KV_HEADS,
        "intermediate_size": size.intermediate_size,
        "tie_word_embeddings": size.has_tied_head,
        "vocab_size": size.vocab_size,
        "eos_token_id": eos_token_id,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    if is_trained:
        _train_tokenizer().save(str(directory / "tokenizer.json"))
    else:
        write_tokenizer(directory, size.vocab_size)
    described: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _CHAT_TEMPLATE}
    if is_trained:
        described |= {"eos_token": SPECIAL_TOKENS[2], "pad_token": SPECIAL_TOKENS[0]}
    (directory / "tokenizer_config.json").write_text(json.dumps(described), "utf-8")


def _train_tokenizer() -> Tokenizer:
    """Byte-level BPE of the sources that come with Python: no download, and text that has structure."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=NUM_TRAINED, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_sources(), trainer)
    if tokenizer.get_vocab_size() != NUM_TRAINED:
        raise SystemExit(f"Python's sources here make only {tokenizer.get_vocab_size()} tokens of {NUM_TRAINED}")
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _sources() -> Iterator[str]:
    for path in islice(sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")), _NUM_SOURCES):
        yield path.read_text("utf-8", errors="ignore")
