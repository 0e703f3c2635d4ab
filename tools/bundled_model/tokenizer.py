"""Trains the bundled model's tokenizer, a byte-level BPE, and writes its files in the Hugging Face layout."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.bundled_model.dialogue import Dialogue, plain_text, system_prompt

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
CONTEXT_LENGTH = 2048

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

_TURNS_PER_CHAT = 6


def train_tokenizer(vocabulary: int, chats: int, seed: int) -> Tokenizer:
    """Train a byte-level BPE on chats and plain texts of the grammar."""
    tokenizer = Tokenizer(models.BPE())
    # Single digits keep numbers from taking up the vocabulary; the model makes nothing of them anyway.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(chats, seed), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    added = {
        str(special_id(tokenizer, token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_LENGTH,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token, which every tokenizer of this script has."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token}")
    return found


def _texts(chats: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(chats):
        dialogue = Dialogue(rng)
        yield f"system\n{system_prompt(rng) or ''}"
        for _ in range(_TURNS_PER_CHAT):
            turn = dialogue.turn()
            yield f"user\n{turn.user}"
            yield f"assistant\n{turn.answer}"
        yield plain_text(rng)
