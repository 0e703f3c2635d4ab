"""Kernels compiled many at a time. Triton compiles one when it is first launched, and whoever launches waits: half a
minute for a model's graphs, most of it in LLVM and ptxas, which do without the interpreter's lock.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction

_MOST_THREADS = 16


@contextmanager
def compiling() -> Iterator[None]:
    """Kernels that this thread launches in here are not launched: they are compiled, or read from disk, and once this
    is left they are ready. Not for two threads at once. Without effect on Triton's interpreter.

    Raises:
        triton.CompilationError: on leaving, one of them cannot be compiled.
    """
    launch, thread = JITFunction.run, threading.get_ident()

    def compile_only(self: "JITFunction[Any]", *args: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, warmup=warmup or threading.get_ident() == thread, **options)

    with ThreadPoolExecutor(_num_threads(), "compile") as threads, triton.AsyncCompileMode(threads):
        # Triton has this for a single launch, `warmup`, but not for all that a model's step makes.
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = launch


def _num_threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST_THREADS, cores)
