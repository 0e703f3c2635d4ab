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
    has_texts: bool = False  # its tokenizer was trained on text: prompts are texts, and every id has one

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
    # The layers of 0.6b, and a vocabulary that a tokenizer was trained to on text.
    "v32k": Size(1024, 28, 16, 3072, has_tied_head=True, vocab_size=NUM_TRAINED + len(SPECIAL_TOKENS), has_texts=True),
    "8b-text": Size(4096, 36, 32, 12288, has_tied_head=False, has_texts=True),
}


def write_qwen3(directory: Path, name: str) -> None:
    """The configuration of one of `SIZES` and a tokenizer in which every id has a text."""
    size = SIZES[name]
    eos_token_id = size.vocab_size - 1 if size.has_texts else 151_645
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
    if size.has_texts:
        _text_tokenizer(size.vocab_size).save(str(directory / "tokenizer.json"))
    else:
        write_tokenizer(directory, size.vocab_size)
    described: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _CHAT_TEMPLATE}
    if size.has_texts:
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
    return tokenizer


def _text_tokenizer(vocab_size: int) -> Tokenizer:
    """Entries that no text is made of fill the vocabulary up, so that every id that is sampled has a text."""
    described = json.loads(_train_tokenizer().to_str())
    num_entries = vocab_size - len(SPECIAL_TOKENS)
    described["model"]["vocab"] |= {f"Ġid{token_id}": token_id for token_id in range(NUM_TRAINED, num_entries)}
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _sources() -> Iterator[str]:
    for path in islice(sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")), _NUM_SOURCES):
        yield path.read_text("utf-8", errors="ignore")
