"""One streamed call after the other on one HTTP connection, and when what came."""

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import SplitResult, urlsplit

import httptools
import msgspec

from penstock.openai_stream import DONE, DataReader, decode_event

_ERROR_CHARS = 300
_OK = 200


@dataclass(slots=True)
class Outcome:
    """What became of one request; monotonic seconds."""

    sent_s: float
    ended_s: float = 0.0
    told_s: list[float] = field(default_factory=list)  # when each event with output came
    prompt_tokens: int = 0
    output_tokens: int = 0  # as the server's usage counts
    error: str = ""  # empty: it ended as it should


@dataclass(frozen=True, slots=True)
class Server:
    """A server with OpenAI's API, and how it is called."""

    url: SplitResult
    path: str  # of the call, e.g. /v1/completions
    api_key: str | None = None

    @classmethod
    def at(cls, base_url: str, path: str, api_key: str | None) -> "Server":
        """The server at a URL without /v1."""
        return cls(urlsplit(base_url.rstrip("/")), path, api_key)

    def request(self, body: bytes) -> bytes:
        """The bytes of a call."""
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"POST {self.url.path}{self.path} HTTP/1.1\r\nHost: {self.url.netloc}\r\n{key}"
            f"Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def connect(self) -> "StreamConnection":
        """A connection.

        Raises:
            OSError: the server cannot be reached.
        """
        is_tls = self.url.scheme == "https"
        port = self.url.port or (443 if is_tls else 80)
        context = ssl.create_default_context() if is_tls else None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(StreamConnection, self.url.hostname or "", port, ssl=context)
        return connection


class StreamConnection(asyncio.Protocol):
    """A connection; one call at a time."""

    def __init__(self) -> None:
        self._outcome = Outcome(0.0)
        self._ended: asyncio.Future[None] | None = None
        self._begin_answer()
        self.is_open = True

    async def call(self, request: bytes) -> Outcome:
        """Sends a request and waits for its end."""
        self._outcome = outcome = Outcome(time.perf_counter())
        self._ended = asyncio.get_running_loop().create_future()
        self._begin_answer()
        self._transport.write(request)
        await self._ended
        if not outcome.error and not outcome.output_tokens:
            outcome.output_tokens = len(outcome.told_s)  # of a server that tells no usage
        return outcome

    def close(self) -> None:
        """Ends the connection."""
        self._transport.close()

    def _begin_answer(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._reader = DataReader()
        self._refusal = b""  # the body of an answer that is no stream

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:  # noqa: D102
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"the answer is no HTTP: {error}")
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: D102
        self.is_open = False
        self._end(f"the connection broke: {error or 'closed by the server'}")

    # What the parser calls.

    def on_body(self, body: bytes) -> None:  # noqa: D102
        if self._parser.get_status_code() != _OK:
            self._refusal += body
            return
        now_s = time.perf_counter()
        for data in self._reader.feed(body):
            if data != DONE:
                self._take(data, now_s)

    def on_message_complete(self) -> None:  # noqa: D102
        status = self._parser.get_status_code()
        self.is_open = self._parser.should_keep_alive()
        self._end("" if status == _OK else f"HTTP {status}: {self._refusal.decode('utf-8', 'replace')[:_ERROR_CHARS]}")

    def _take(self, data: bytes, now_s: float) -> None:
        outcome = self._outcome
        try:
            event = decode_event(data)
        except msgspec.DecodeError as error:
            outcome.error = f"an event is not as OpenAI's: {error}"
            return
        if event.error is not None:
            outcome.error = f"the stream ended with an error: {event.error!r:.{_ERROR_CHARS}}"
        if any(choice.has_output for choice in event.choices or ()):
            outcome.told_s.append(now_s)
        if event.usage is not None:
            outcome.prompt_tokens = event.usage.prompt_tokens
            outcome.output_tokens = event.usage.completion_tokens

    def _end(self, error: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._outcome.error = self._outcome.error or error
            self._outcome.ended_s = time.perf_counter()
            self._ended.set_result(None)
