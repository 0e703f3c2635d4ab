"""Real pipelines, started once for all tests that only call them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import scripted_agents
from served import CALM_LEASES, LONG_MODEL_LEN, SIMULATED, Served, write_checkpoint

from penstock.launcher.layout import BUNDLED_MODEL


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for the simulated runner."""
    directory = tmp_path_factory.mktemp("byte-model")
    write_checkpoint(directory)
    return directory


@pytest.fixture(scope="session")
def long_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose streams may be of `ENDLESS_TOKENS`."""
    directory = tmp_path_factory.mktemp("long-model")
    write_checkpoint(directory, LONG_MODEL_LEN)
    return directory


@pytest.fixture(scope="session")
def simulated(long_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Everything but a real model."""
    flags = (f"--model={long_checkpoint}", "--served-model-name=simulated", "--step-ms=1", *SIMULATED)
    flags += (CALM_LEASES,)
    with Served(tmp_path_factory.mktemp("simulated"), *flags) as served:
        yield served.wait_ready()


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """What `make run` starts."""
    assert BUNDLED_MODEL.is_dir(), "the bundled model is part of the repository"
    with Served(tmp_path_factory.mktemp("bundled"), "--num-threads=1", CALM_LEASES) as served:
        yield served.wait_ready()


@pytest.fixture(scope="session")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two gateways, and workers that answer agents by a script."""
    checkpoint = tmp_path_factory.mktemp("calling-model")
    with scripted_agents.serve(checkpoint, tmp_path_factory.mktemp("agents")) as served:
        yield served.wait_ready()
