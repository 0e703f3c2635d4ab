"""The presence of an HTTP client while its call begins."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

R = TypeVar("R")

PRESENCE = "penstock.presence"  # in a request's scope


class Presence:
    """The client of one request. Beginning may wait for a server that is away, and clients go elsewhere meanwhile.

    A call that began all the same would take its requests from the gateway to which its client has come since.
    """

    __slots__ = ("_beginning", "has_left")

    def __init__(self) -> None:
        """The client is there."""
        self.has_left = False
        self._beginning: asyncio.Task[Any] | None = None

    def leave(self) -> None:
        """The connection is lost: what is being begun for it ends."""
        self.has_left = True
        if self._beginning is not None:
            self._beginning.cancel()

    async def while_there(self, begin: Callable[[], Awaitable[R]]) -> R | None:
        """Begin something in the caller's own task; None: its client has left before it had begun."""
        task = asyncio.current_task()
        if self.has_left or task is None:
            return None
        self._beginning = task
        try:
            return await begin()
        except asyncio.CancelledError:
            if self._has_cancelled(task):
                return None
            raise
        finally:
            self._beginning = None

    def _has_cancelled(self, task: asyncio.Task[Any]) -> bool:
        """Return whether `leave` alone cancelled a task, and take that back."""
        return self.has_left and not task.uncancel()
