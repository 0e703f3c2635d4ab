import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from byte_tokenizer import write_tokenizer
from fired_at import FiredAt

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 256,
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for the simulated runner: a token for each byte, and a chat template."""
    directory = tmp_path_factory.mktemp("simulated")
    write_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<eos>"}))
    return directory


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> Iterator[FiredAt]:
    with FiredAt(checkpoint) as pipeline:
        yield pipeline
