"""A checkpoint's text files, written to a directory."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=specials,
        show_progress=False,
    )
    made.train_from_iterator(["the miller's cat slept in the sun"] * 4, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def write_checkpoint(path: Path, **changes: Any) -> Path:
    """Files by name without suffix; a value of None leaves the file out, a string is written as it is."""
    made = tokenizer()
    files: dict[str, Any] = {
        "tokenizer": made.to_str(),
        "config": {"vocab_size": 310, "max_position_embeddings": 64, "eos_token_id": 1},
        "generation_config": {"eos_token_id": [1, 3]},
        "tokenizer_config": {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML},
        **changes,
    }
    path.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        if value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            (path / (name if "." in name else f"{name}.json")).write_text(text, "utf-8")
    return path
