"""Receivers of text: an event stream, a plain reply, or a gRPC stream."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from contract.domain import chain as chains
from contract.domain.errors import Fault, PenstockError
from contract.domain.finish import Usage
from contract.domain.rows import TextRow
from gateway_svc.core.admission import RETRY_AFTER_S
from gateway_svc.core.api import ErrorFields, EventFormat, PlainReply
from gateway_svc.core.backlog import Backlog
from gateway_svc.core.prompt_outputs import PromptOutput
from gateway_svc.core.replies import encode
from gateway_svc.core.sse import KEEP_ALIVE
from gateway_svc.core.told import ToldChoice
from gateway_svc.outlet import Outlet, Send

Headers = list[tuple[bytes, bytes]]
_UNAUTHENTICATED = 401
_RETRY_STATUSES = (429, 503)


def error_headers(error: PenstockError) -> Headers:
    """Headers of an error's JSON body."""
    headers: Headers = [(b"content-type", b"application/json")]
    if error.kind.http_status == _UNAUTHENTICATED:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.fault is not Fault.NOBODY:
        # Clients go by the status and would send 409 and 500 again, some of them 400 too.
        headers.append((b"x-should-retry", b"false"))
    if error.kind.http_status in _RETRY_STATUSES:
        headers.append((b"retry-after", b"%d" % math.ceil(error.retry_after_s or RETRY_AFTER_S)))
    return headers


def _write_whole(outlet: Outlet, status: int, headers: Headers, body: bytes) -> None:
    length = (b"content-length", b"%d" % len(body))
    outlet.write({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    outlet.write({"type": "http.response.body", "body": body})


class SseSink:
    """A streamed HTTP reply.

    Its status line waits for the first row, so that an early error has a status of its own, or for the first comment
    that keeps a silent connection alive.
    """

    def __init__(
        self,
        send: Send,
        form: EventFormat,
        n: int,
        headers: Headers,
        max_backlog_bytes: int,
        *,
        error_fields: ErrorFields,
    ) -> None:
        self._error_fields = error_fields
        self._outlet = Outlet(send, self._drained)
        self._format = form
        self._n = n
        self._headers = headers
        self._backlog = Backlog(max_backlog_bytes)
        self._started = False
        self._is_over = False
        self._last: bytes | None = None  # what stands after the backlog: the call is over
        self._keep_alive_s = 0.0
        self._written_s = 0.0  # when something was, by the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self.refill: Callable[[], None] = lambda: None

    @property
    def has_room(self) -> bool:
        """Implement `call.Sink`."""
        return not self._backlog.is_full

    def keep_alive(self, seconds: float) -> None:
        """Writes a comment where nothing was written for so long, until the reply ends or `close`; 0: never."""
        if seconds and not self._is_over:
            self._keep_alive_s = seconds
            self._written_s = asyncio.get_running_loop().time()
            self._look_again(seconds)

    def close(self) -> None:
        """No comments any more."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()

    def learn(self, prompt: int, num_prompt_tokens: int) -> None:
        """Implement `call.Sink`."""
        self._format.learn(range(prompt * self._n, (prompt + 1) * self._n), num_prompt_tokens)

    def learn_model(self, prompt: int, model_digest: bytes) -> None:
        """Tell the model with every chunk of the prompt's choices."""
        self._format.learn_model(range(prompt * self._n, (prompt + 1) * self._n), model_digest)

    def learn_prompt(self, prompt: int, output: PromptOutput) -> None:
        """Implement `call.Sink`."""
        self._format.learn_prompt(range(prompt * self._n, (prompt + 1) * self._n), output)

    def recall(self, prompt: int, row: TextRow) -> None:
        """Implement `call.Sink`."""
        self._format.recall(prompt * self._n + row.sequence, row)

    def take(self, prompt: int, row: TextRow, chain: int) -> None:
        """One event for each row; a client that lags gets several rows in one event."""
        choice = prompt * self._n + row.sequence
        if self._outlet.blocked:
            self._backlog.add(choice, row)
            return
        data = self._format.chunk(choice, row, chain)
        if data:
            self._write(data, more=True)

    def end(self, usages: Sequence[Usage]) -> None:
        """The usage and the end mark."""
        self._finish(lambda: self._format.end(usages))

    def fail(self, error: PenstockError) -> None:
        """An error status if nothing was sent yet, else an error event."""
        self.close()
        if not self._started:
            headers = [*error_headers(error), *self._headers]
            _write_whole(self._outlet, error.kind.http_status, headers, encode(self._error_fields(error)))
            return
        self._finish(lambda: self._format.fail(error))

    def _finish(self, last: Callable[[], bytes]) -> None:
        self.close()
        if self._outlet.blocked:
            self._last = self._rest() + last()
        else:
            self._write(last(), more=False)

    def _rest(self) -> bytes:
        return b"".join(self._format.chunk(choice, row, chain_after(row)) for choice, row in self._backlog.drain())

    def _drained(self) -> None:
        if self._last is not None:
            self._write(self._last, more=False)
            return
        was_full = self._backlog.is_full
        if data := self._rest():
            self._write(data, more=True)
        if was_full:
            self.refill()

    def _write(self, data: bytes, *, more: bool) -> None:
        if not self._started:
            self._started = True
            kind = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            self._outlet.write({"type": "http.response.start", "status": 200, "headers": [*kind, *self._headers]})
        self._outlet.write({"type": "http.response.body", "body": data, "more_body": more})
        if self._keep_alive_s:
            self._written_s = asyncio.get_running_loop().time()

    def _look_again(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        """One timer for many events: to set it anew with each would take longer than to write down when it came."""
        left_s = self._written_s + self._keep_alive_s - asyncio.get_running_loop().time()
        if left_s > 0:
            self._look_again(left_s)
            return
        if not self._outlet.blocked:  # else it is the client that is slow
            self._write(KEEP_ALIVE, more=True)
        self._look_again(self._keep_alive_s)


class ReplySink:
    """A plain HTTP reply, written when everything has ended."""

    has_room = True

    def __init__(
        self, send: Send, reply: PlainReply, n: int, headers: Headers, arrival_ns: int, *, error_fields: ErrorFields
    ) -> None:
        """`arrival_ns`: when the call was accepted, Unix time."""
        self._error_fields = error_fields
        self._outlet = Outlet(send, lambda: None)
        self._reply = reply
        self._n = n
        self._headers = headers
        self._arrival_ns = arrival_ns
        self._first_ns = 0  # when the first row came

    def learn(self, prompt: int, num_prompt_tokens: int) -> None:
        """Implement `call.Sink`: the usage comes with the ends."""

    def learn_model(self, prompt: int, model_digest: bytes) -> None:
        """Nothing to keep: the rows say so."""

    def learn_prompt(self, prompt: int, output: PromptOutput) -> None:
        """Implement `call.Sink`."""
        self._reply.learn_prompt(range(prompt * self._n, (prompt + 1) * self._n), output)

    def recall(self, prompt: int, row: TextRow) -> None:
        """Its client has nothing yet."""

    def take(self, prompt: int, row: TextRow, chain: int) -> None:  # noqa: ARG002  (for event ids)
        """Implement `call.Sink`."""
        self._first_ns = self._first_ns or time.time_ns()
        self._reply.add(prompt * self._n + row.sequence, row)

    def end(self, usages: Sequence[Usage]) -> None:
        """The reply."""
        headers = [(b"content-type", b"application/json"), self._timing(), *self._headers]
        _write_whole(self._outlet, 200, headers, encode(self._reply.fields(usages)))

    def fail(self, error: PenstockError) -> None:
        """The error instead of a reply."""
        headers = [*error_headers(error), *self._headers]
        _write_whole(self._outlet, error.kind.http_status, headers, encode(self._error_fields(error)))

    def _timing(self) -> tuple[bytes, bytes]:
        """The header Server-Timing: milliseconds since the call was accepted."""
        first_ms, total_ms = ((at_ns - self._arrival_ns) / 1e6 for at_ns in (self._first_ns, time.time_ns()))
        return b"server-timing", b"first-token;dur=%.1f, total;dur=%.1f" % (first_ms, total_ms)


class QueueSink:
    """Rows for a coroutine that fetches them; what it does not fetch in time is merged."""

    def __init__(self, n: int, max_backlog_bytes: int, told: Sequence[ToldChoice] = ()) -> None:
        """`told`: of a call whose outputs are told in parts, its choices, for who fetches their rows."""
        self.told = told
        self._n = n
        self._backlog = Backlog(max_backlog_bytes)
        self._woken = asyncio.Event()
        self._ended = False
        self._error: PenstockError | None = None
        self._prompts: list[tuple[int, PromptOutput]] = []
        self.refill: Callable[[], None] = lambda: None

    @property
    def has_room(self) -> bool:
        """Implement `call.Sink`."""
        return not self._backlog.is_full

    def learn(self, prompt: int, num_prompt_tokens: int) -> None:
        """Implement `call.Sink`: the usage comes with the ends."""

    def learn_model(self, prompt: int, model_digest: bytes) -> None:
        """Nothing to keep: the rows say so."""

    def learn_prompt(self, prompt: int, output: PromptOutput) -> None:
        """Implement `call.Sink`: its rows follow at once, and wake who fetches them."""
        self._prompts.append((prompt, output))

    def take_prompts(self) -> list[tuple[int, PromptOutput]]:
        """The logprobs of prompts that are to be told before what `fetch` returned, each with its index."""
        prompts, self._prompts = self._prompts, []
        return prompts

    def recall(self, prompt: int, row: TextRow) -> None:
        """Implement `call.Sink`: it comes before all rows of its choice."""
        if self.told:
            self.told[prompt * self._n + row.sequence].recall(row)

    def take(self, prompt: int, row: TextRow, chain: int) -> None:  # noqa: ARG002  (rows may be merged)
        """Implement `call.Sink`."""
        self._backlog.add(prompt * self._n + row.sequence, row)
        self._woken.set()

    def end(self, usages: Sequence[Usage]) -> None:  # noqa: ARG002  (the last row has it)
        """Implement `call.Sink`."""
        self._ended = True
        self._woken.set()

    def fail(self, error: PenstockError) -> None:
        """Implement `call.Sink`."""
        self._error = error
        self._woken.set()

    async def fetch(self) -> list[tuple[int, TextRow]]:
        """The next rows, one for each choice, with its index; none: the call has ended.

        Raises:
            PenstockError: it ended with an error; all rows before were fetched.
        """
        await self._woken.wait()
        was_full = self._backlog.is_full
        rows = self._backlog.drain()
        if not rows and self._error is not None:
            raise self._error
        if not self._ended and self._error is None:
            self._woken.clear()
        if was_full:
            self.refill()
        return rows


def chain_after(row: TextRow) -> int:
    """The hash over a sample's tokens after a row."""
    return chains.extend(row.chain, row.token_ids)
