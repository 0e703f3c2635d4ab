"""Large bodies are read and written in a thread, so that the loop has its turns meanwhile."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

LARGE_BYTES = 64 * 1024  # about a millisecond to parse

P = ParamSpec("P")
T = TypeVar("T")


async def off_loop(num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The function's value, computed in a thread if it is about so many bytes."""
    if num_bytes > LARGE_BYTES:
        return await asyncio.to_thread(function, *args, **kwargs)
    return function(*args, **kwargs)
