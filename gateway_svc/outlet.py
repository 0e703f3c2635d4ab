"""Writing an HTTP response from outside its own task."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class Outlet:
    """Sends the messages of one ASGI response at once, from whatever runs in the loop.

    An ASGI `send` only waits when the socket is full. So its first step is taken here, without a task of its own: that
    is all there is to it while the client keeps up, and one reader can write to all clients. A `send` that does wait is
    finished by a task, and what comes meanwhile stands after it.
    """

    __slots__ = ("_drained", "_queue", "_send", "_task")

    def __init__(self, send: Send, drained: Callable[[], None]) -> None:
        """`drained` is called when a client that had not kept up has taken everything."""
        self._send = send
        self._drained = drained
        self._queue: deque[Message] = deque()
        self._task: asyncio.Task[None] | None = None

    @property
    def blocked(self) -> bool:
        """Return whether the client does not keep up; what is written now takes memory."""
        return self._task is not None

    def write(self, message: Message) -> None:
        """Sends a message after all others."""
        if self._task is not None:
            self._queue.append(message)
            return
        steps = self._send(message).__await__()
        try:
            awaited = next(steps)
        except StopIteration:
            return
        self._task = asyncio.get_running_loop().create_task(self._finish(_Begun(awaited, steps)))

    async def _finish(self, begun: "_Begun") -> None:
        await begun
        while self._queue:
            await self._send(self._queue.popleft())
        self._task = None
        self._drained()


class _Begun:
    """The rest of an awaitable whose first step was taken."""

    __slots__ = ("_awaited", "_steps")

    def __init__(self, awaited: Any, steps: Generator[Any, Any, None]) -> None:
        self._awaited = awaited
        self._steps = steps

    def __await__(self) -> Generator[Any, Any, None]:
        yield self._awaited
        yield from self._steps
