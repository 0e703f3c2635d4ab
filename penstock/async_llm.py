"""Generate with a model in this process from an event loop: the engine of `LLM` in a thread of its own."""

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Self, TypeAlias

from contract.domain.errors import ErrorCode, PenstockError, invalid
from contract.domain.params import SamplingParams
from penstock.chat_tokenizer import ChatTokenizer
from penstock.llm import LLM
from penstock.outputs import RequestOutput
from penstock.prompts import PromptLike

_Command: TypeAlias = Callable[[], None]


class AsyncLLM:
    """A model that answers calls of coroutines, batched as they come.

    May be used from several event loops. Its requests are computed by a thread that ends with `shutdown`, or with
    `async with`.
    """

    def __init__(self, model: str, **options: Any) -> None:
        """Load the model; the calling thread waits for that.

        Args:
            model: directory in the Hugging Face layout, or a hub id.
            options: as `LLM` takes them.

        Raises:
            PenstockError: as `LLM` does.
        """
        self._llm = LLM(model, **options)
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        # Of the thread alone, as the engine is. An id of the caller's may be another request's as soon as its own is
        # given up, when the engine has still to tell its end: the engine's ids are counted.
        self._streams: dict[str, _Stream] = {}  # by the engine's id
        self._keys: dict[str, str] = {}  # the engine's ids by the callers'
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._end: PenstockError | None = None  # why nothing is taken any more
        self._thread = threading.Thread(target=self._run, name="AsyncLLM", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)

    @property
    def is_running(self) -> bool:
        """Return whether it takes requests."""
        return self._end is None

    def get_tokenizer(self) -> ChatTokenizer:
        """The tokenizer that prompts go through, with the model's chat templates."""
        return self._llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a call that gives none, as `LLM` has them."""
        return self._llm.get_default_sampling_params()

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one prompt: all of the output so far, again and again until it has finished.

        Whoever takes outputs later than they come gets the latest. Closing the iterator gives the request up.

        Args:
            prompt: text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            sampling_params: how to generate, which counts as it is; None: the model's defaults. `max_tokens` beyond the
                context are as many as it leaves.
            request_id: any text that no unfinished request has; None: one is made.
            priority: lower is served first (with `scheduling_policy="priority"`).
            timeout_s: seconds from now after which the request ends with an error; None: never.

        Raises:
            PenstockError: the prompt is wrong, the request failed, or the engine has ended.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        key = str(next(self._numbers))
        stream = _Stream(f"async-{key}" if request_id is None else request_id, asyncio.get_running_loop())

        def add() -> None:
            if stream.request_id in self._keys:
                raise invalid(f"request id {request_id!r} is in use by an unfinished request", "request_id")
            self._llm.llm_engine.add_request(key, prompt, params, priority, timeout_s=timeout_s, clips=True)
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
        await self._do(lambda: self._llm.llm_engine.abort_request(self._keys.get(request_id, "")))

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
        engine = self._llm.llm_engine
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
                stream.put(_snapshot(output, stream.request_id))

    def _give_up(self, key: str) -> None:
        if self._forget(key):
            self._llm.llm_engine.abort_request(key)

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
        self._llm.llm_engine.close()


class _Stream:
    """The latest output of a request, from the engine's thread to an event loop."""

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id  # the caller's
        self._loop = loop
        self._is_new = asyncio.Event()
        self._lock = threading.Lock()
        self._latest: RequestOutput | None = None
        self._error: PenstockError | None = None

    def put(self, output: RequestOutput) -> None:
        """Called by the thread."""
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
