from collections.abc import Iterator
from pathlib import Path

import pytest
from byte_tokenizer import write_byte_model
from fired_at import FiredAt


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for the simulated runner, with a chat template."""
    directory = tmp_path_factory.mktemp("simulated")
    write_byte_model(directory, chats=True)
    return directory


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> Iterator[FiredAt]:
    with FiredAt(checkpoint) as pipeline:
        yield pipeline
