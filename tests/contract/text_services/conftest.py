from pathlib import Path

import pytest
from text_pipeline import Pool, write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pool(model: Path) -> Pool:
    return Pool(model)
