"""Kernels compiled many at a time. Triton compiles one when it is first launched, and whoever launches waits: half a
minute for a model's graphs, most of it in LLVM and ptxas, which do without the interpreter's lock.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import triton
from triton.runtime.jit import JITFunction


def compile_launches(launch_all: Callable[[], object], num_threads: int) -> None:
    """Kernels that this thread launches in `launch_all` are not launched: so many threads compile them, or read them
    from disk, and when this returns they are ready. Not for two threads at once. Without effect on the interpreter.

    Raises:
        triton.CompilationError: one of them cannot be compiled.
    """
    # In a context of its own: after an error Triton would go on handing kernels to threads that are no more.
    copy_context().run(_compile_launches, launch_all, num_threads)


def _compile_launches(launch_all: Callable[[], object], num_threads: int) -> None:
    launch, thread = JITFunction.run, threading.get_ident()

    def compile_only(self: "JITFunction[Any]", *args: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, warmup=warmup or threading.get_ident() == thread, **options)

    with ThreadPoolExecutor(num_threads, "compile") as threads, triton.AsyncCompileMode(threads):
        # Triton has this for a single launch, `warmup`, but not for all that a model's step makes.
        JITFunction.run = compile_only
        try:
            launch_all()
        finally:
            JITFunction.run = launch
