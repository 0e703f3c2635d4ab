"""Kernels that are compiled together instead of being launched."""

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hopper import on_hopper
from triton.runtime.jit import JITFunction

from worker_svc.core.kernels.compiling import compile_launches
from worker_svc.core.kernels.linear.activation import silu_mul
from worker_svc.core.kernels.linear.norm import rms_norm


@pytest.fixture(autouse=True)
def _nothing_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@triton.jit
def _impossible(x_ptr):
    tl.static_assert(False)


def launch_each_twice() -> None:
    gates = torch.full((3, 256), 2.0, dtype=torch.bfloat16)
    for _ in range(2):
        silu_mul(gates)
        rms_norm(gates, torch.ones(256, dtype=torch.bfloat16), 1e-6)


def compile_two() -> None:
    compiled: list[str] = []

    def observe(**event: Any) -> None:
        if not event["cache_hit"]:
            compiled.append(event["src"].name)

    triton.knobs.compilation.listener = observe
    launch = JITFunction.run
    for _ in range(2):
        compile_launches(launch_each_twice, 2)
    assert sorted(compiled) == ["_rms_norm", "_silu_mul"]
    assert JITFunction.run is launch


def compile_the_impossible() -> None:
    with pytest.raises(triton.CompilationError):
        compile_launches(lambda: _impossible[(1,)](torch.zeros(1)), 2)
    compile_two()


def test_each_kernel_is_compiled_once_and_none_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    on_hopper(monkeypatch, compile_two)


def test_a_kernel_that_cannot_be_compiled_says_so_and_the_next_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    on_hopper(monkeypatch, compile_the_impossible)
