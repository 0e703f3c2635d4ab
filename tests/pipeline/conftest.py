"""A model for the simulated runner: a token for each byte."""

import json
from pathlib import Path

import pytest
from byte_tokenizer import write_tokenizer

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


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("simulated")
    write_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory
