"""An engine in a thread of its own, for event loops."""

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from typing import TypeAlias

from contract.domain.errors import ErrorCode, PenstockError, invalid
from contract.domain.params import SamplingParams
from contract.domain.pooling import Pooling
from contract.domain.request import Prompt
from penstock.engine import LLMEngine
from penstock.latest_output import LatestOutput
from penstock.outputs import RequestOutput
from penstock.prompts import PromptLike

_Command: TypeAlias = Callable[[], None]


class EngineThread:
    """Computes the requests of an engine, which nothing else may call meanwhile. May be used from several loops."""

    def __init__(self, engine: LLMEngine) -> None:
        """Begun; the thread ends with `shutdown`, and closes the engine."""
        self._engine = engine
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        # Of the thread alone, as the engine is. An id of the caller's may be another request's as soon as its own is
        # given up, when the engine has still to tell its end: the engine's ids are counted.
        self._streams: dict[str, LatestOutput] = {}  # by the engine's id
        self._keys: dict[str, str] = {}  # the engine's ids by the callers'
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._end: PenstockError | None = None  # why nothing is taken any more
        self._thread = threading.Thread(target=self._run, name="AsyncLLM", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Return whether it takes requests."""
        return self._end is None

    async def outputs(
        self,
        prompt: PromptLike | Prompt,
        params: SamplingParams,
        request_id: str | None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        pooling: Pooling | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The states of a request until it has finished, of which who is late gets the latest.

        Args:
            prompt: as `LLMEngine.add_request` takes it.
            params: how to generate; `max_tokens` beyond the context are as many as it leaves.
            request_id: any text that no unfinished request has; None: one is made.
            priority: lower is served first.
            timeout_s: seconds from now after which the request ends with an error; None: never.
            pooling: how the prompt becomes a vector; None: it is answered.

        Raises:
            PenstockError: the prompt is wrong, the request failed, or the engine has ended.
        """
        key = str(next(self._numbers))
        stream = LatestOutput(f"async-{key}" if request_id is None else request_id, asyncio.get_running_loop())

        def add() -> None:
            if stream.request_id in self._keys:
                raise invalid(f"request id {request_id!r} is in use by an unfinished request", "request_id")
            self._engine.add_request(key, prompt, params, priority, timeout_s=timeout_s, clips=True, pooling=pooling)
            self._streams[key], self._keys[stream.request_id] = stream, key

        try:
            await self._do(add)
            while True:
                output = await stream.next()
                if output.error is not None:
                    raise output.error.raised()
                yield output
                if output.finished:
                    return
        finally:
            # Not awaited: a generator that is closed may not go on, and the thread comes to it.
            self._send(lambda: self._give_up(key))

    async def abort(self, request_id: str) -> None:
        """End a request: its iterator gives out what it has, with the finish reason "abort". One that has ended, or
        never was, is no error.
        """
        await self._do(lambda: self._engine.abort_request(self._keys.get(request_id, "")))

    def shutdown(self) -> None:
        """End the thread and give the device's memory back; what was unfinished fails."""
        self._close(PenstockError(ErrorCode.UNAVAILABLE, "the AsyncLLM was shut down"))
        self._thread.join()

    async def _do(self, command: _Command) -> None:
        """Have the thread do something; what it raises is raised here."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                command()
            except Exception as error:  # noqa: BLE001  (the caller's, whatever it is)
                done.set_exception(error)
            else:
                done.set_result(None)

        if not self._send(run):
            assert self._end is not None
            raise self._end
        # Whoever is cancelled here has its command done all the same: `generate` gives the request up after it.
        await asyncio.shield(asyncio.wrap_future(done))

    def _send(self, command: _Command) -> bool:
        """Return whether the thread will do it."""
        with self._lock:
            if self._end is None:
                self._commands.put(command)
            return self._end is None

    def _close(self, error: PenstockError) -> None:
        with self._lock:
            self._end = self._end or error
            self._commands.put(lambda: None)  # it may be waiting

    def _run(self) -> None:
        """The thread: commands, and a step while there is something to compute."""
        engine = self._engine
        try:
            while self._end is None:
                for command in self._waiting(blocks=not engine.has_unfinished_requests()):
                    command()
                if engine.has_unfinished_requests():
                    self._tell(engine.step())
        except PenstockError as error:
            self._close(error)
        except Exception as error:  # a defect: nobody may wait for ever
            self._close(PenstockError(ErrorCode.INTERNAL, f"the engine ended: {type(error).__name__}: {error}"))
            raise
        finally:
            self._fail()

    def _waiting(self, *, blocks: bool) -> Iterable[_Command]:
        """The commands that wait; with `blocks`, at least one."""
        if blocks:
            yield self._commands.get()
        while not self._commands.empty():
            yield self._commands.get()

    def _tell(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                if output.finished:
                    self._forget(output.request_id)
                stream.put(output)

    def _give_up(self, key: str) -> None:
        if self._forget(key):
            self._engine.abort_request(key)

    def _forget(self, key: str) -> bool:
        """Return whether somebody waited for it."""
        stream = self._streams.pop(key, None)
        if stream is not None:
            del self._keys[stream.request_id]
        return stream is not None

    def _fail(self) -> None:
        """Everybody learns that nothing comes any more, also those whose commands were not done."""
        assert self._end is not None
        for command in self._waiting(blocks=False):
            command()
        for stream in self._streams.values():
            stream.fail(self._end)
        self._streams.clear()
        self._keys.clear()
        self._engine.close()
