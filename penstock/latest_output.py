"""The outputs of a request on their way from an engine's thread to an event loop."""

import asyncio
import threading
from dataclasses import replace

from contract.domain.errors import PenstockError
from penstock.outputs import RequestOutput


class LatestOutput:
    """The latest output of a request, from the engine's thread to an event loop."""

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id  # the caller's
        self._loop = loop
        self._is_new = asyncio.Event()
        self._lock = threading.Lock()
        self._latest: RequestOutput | None = None
        self._error: PenstockError | None = None

    def put(self, output: RequestOutput) -> None:
        """Called by the thread, which goes on with this output."""
        output = _snapshot(output, self.request_id)
        with self._lock:
            is_told, self._latest = self._latest is not None, output
        if not is_told:
            self._wake()

    def fail(self, error: PenstockError) -> None:
        """Called by the thread: nothing comes after what is there."""
        with self._lock:
            self._error = error
        self._wake()

    async def next(self) -> RequestOutput:
        """The latest output, when there is a new one.

        Raises:
            PenstockError: nothing comes any more.
        """
        while True:
            await self._is_new.wait()
            self._is_new.clear()
            with self._lock:
                output, self._latest = self._latest, None
            if output is not None:
                if self._error is not None:
                    self._is_new.set()
                return output
            if self._error is not None:
                raise self._error

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._is_new.set)
        except RuntimeError:  # the loop is closed: nobody listens
            return


def _snapshot(output: RequestOutput, request_id: str) -> RequestOutput:
    """The state of an output that the engine goes on with."""
    samples = [
        replace(each, token_ids=each.token_ids.copy(), logprobs=None if each.logprobs is None else each.logprobs.copy())
        for each in output.outputs
    ]
    return replace(output, request_id=request_id, outputs=samples)
