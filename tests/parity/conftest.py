from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from reference import Reference, make_reference


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """What transformers says about a checkpoint, asked once for each."""
    return cache(lambda name: make_reference(name, tmp_path_factory.mktemp(name)))
