from pathlib import Path

import pytest
from byte_tokenizer import write_byte_model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for the simulated runner."""
    directory = tmp_path_factory.mktemp("simulated")
    write_byte_model(directory)
    return directory
