"""The number of threads of a step on a CPU."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock import LLM
from penstock.launcher.layout import BUNDLED_MODEL


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("cores", "quota", "threads"), [(8, "max 100000", 7), (8, "300000 100000", 2), (1, "max 100000", 1), (2, "", 1)]
)
def test_a_step_has_a_thread_less_than_the_process_has_cores(
    cores: int, quota: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr("servicekit.settings._CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    LLM(str(BUNDLED_MODEL), max_num_seqs=1).llm_engine.close()
    assert torch.get_num_threads() == threads


def test_threads_may_be_told() -> None:
    LLM(str(BUNDLED_MODEL), max_num_seqs=1, num_threads=3).llm_engine.close()
    assert torch.get_num_threads() == 3
