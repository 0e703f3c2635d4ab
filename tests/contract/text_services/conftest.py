from collections.abc import Iterator
from pathlib import Path

import pytest
from text_pipeline import Pool, write_model

from servicekit.bus.embedded import EmbeddedServer, find_server


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pool(model: Path) -> Pool:
    return Pool(model)


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[str]:
    server = EmbeddedServer(tmp_path / "data", server=find_server())
    server.start()
    yield server.url
    server.close()
