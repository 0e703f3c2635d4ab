"""Kernels compiled for a Hopper on any machine."""

import importlib
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget

_SHARED_BYTES = 227 * 1024  # that a program can have
_FOLDER = str(Path(__file__).parent)
_IMPORTED = ["pytest", "torch", "triton", "triton.experimental.gluon", "triton_identity"]  # before a process is forked


class _Hopper:
    """The part of Triton's driver that compiling asks."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)


class _Compiled:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel: Any, instruction: str) -> None:
        self._kernel = kernel
        self._instruction = instruction

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            compiled = self._kernel.warmup(*args, grid=grid, **options)
            assert self._instruction in compiled.asm["ptx"]
            assert compiled.metadata.shared <= _SHARED_BYTES

        return launch


class Disassembled:
    """A kernel that is compiled where it would be launched, and whose instructions are looked at."""

    def __init__(self, kernel: Any, look: Callable[[list[str]], None]) -> None:
        self._kernel = kernel
        self._look = look

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            text = self._kernel.warmup(*args, grid=grid, **options).asm["sass"]
            # Of a line what is before the tab says when it can begin.
            self._look([line.rpartition("\t")[2].strip() for line in text.splitlines()])

        return launch


class NotLaunched:
    """A kernel that is left out."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_args, **_options: None


def _compile(module: str, kernel: str, instruction: str, launch: Callable[..., None], *args: Any) -> None:
    where = importlib.import_module(module)
    setattr(where, kernel, _Compiled(getattr(where, kernel), instruction))
    launch(*args)


def compile_for_hopper(
    monkeypatch: pytest.MonkeyPatch, kernel: str, instruction: str, launch: Callable[..., None], *args: Any
) -> None:
    """What `launch(*args)` launches of `kernel`, "module.name", compiles, has the instruction, and fits."""
    module, _, name = kernel.rpartition(".")
    on_hopper(monkeypatch, _compile, module, name, instruction, launch, *args)


def on_hopper(monkeypatch: pytest.MonkeyPatch, function: Callable[..., None], *args: Any) -> None:
    """Call it where Triton compiles for a Hopper and can launch nothing.

    In a process of its own, as Triton's interpreter would have to be off when Triton is imported: forked from one that
    has done that.
    """
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", _FOLDER, prepend=os.pathsep)  # where the one that is forked imports from
    context = get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with ProcessPoolExecutor(1, context) as pool:
        pool.submit(_call, dict(os.environ), function, args).result()


def _call(environ: dict[str, str], function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.update(environ)  # what the test has changed since the first was forked
    triton.runtime.driver.set_active(_Hopper())
    function(*args)
