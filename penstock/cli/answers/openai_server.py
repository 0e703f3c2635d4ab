"""Answers of any server with OpenAI's API, over HTTP."""

import json
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from contract.domain.errors import ErrorCode, PenstockError, invalid
from contract.domain.request import Message
from penstock.cli.answers.piece import Piece
from penstock.openai_stream import DONE, DataReader, Event, decode_event, error_text

_LOOK_TIMEOUT_S = 60.0
_ERROR_CHARS = 300


@dataclass(slots=True)
class OpenAIServer:
    """A server, and how its model is to generate."""

    client: httpx.Client  # its base URL ends with /v1, or what the server has for that
    params: Mapping[str, Any]  # by Penstock's names
    model: str = ""  # empty: the first that the server lists
    timeout_s: float | None = None  # after which an answer is given up; None: never

    def model_name(self) -> str:
        """The model that answers; the server is asked once."""
        self.model = self.model or self._first_model()
        return self.model

    def complete(self, prompt: str) -> Generator[Piece, None, None]:
        """Continues a text."""
        yield from self._pieces("completions", {"prompt": prompt, **self.params})

    def chat(self, messages: Sequence[Message]) -> Generator[Piece, None, None]:
        """Answers a chat."""
        fields = dict(self.params)
        if "max_tokens" in fields:
            fields["max_completion_tokens"] = fields.pop("max_tokens")
        told = [{"role": message.role, "content": message.content} for message in messages]
        yield from self._pieces("chat/completions", {"messages": told, **fields})

    def _first_model(self) -> str:
        try:
            reply = self.client.get("models", timeout=_LOOK_TIMEOUT_S if self.timeout_s is None else self.timeout_s)
        except httpx.HTTPError as error:
            raise self._broken(error) from error
        if reply.status_code != httpx.codes.OK:
            raise _refused(reply.status_code, reply.content)
        try:
            return str(reply.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            message = f"{self.client.base_url}models lists no model: name one with --model"
            raise PenstockError(ErrorCode.UNAVAILABLE, message) from error

    def _pieces(self, path: str, fields: Mapping[str, Any]) -> Generator[Piece, None, None]:
        body = {"model": self.model_name(), "stream": True, "stream_options": {"include_usage": True}, **fields}
        with closing(self._events(path, body)) as events:
            yield from (piece for event in events if (piece := _piece(event)) != Piece())

    def _events(self, path: str, body: Mapping[str, Any]) -> Generator[Event, None, None]:
        """Calls, and reads until the stream says that it is done."""
        ends_s = time.monotonic() + self.timeout_s if self.timeout_s is not None else None
        reader = DataReader()
        try:
            with self.client.stream("POST", path, json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise _refused(answer.status_code, answer.read())
                for part in answer.iter_bytes():
                    for data in reader.feed(part):
                        if data == DONE:
                            return
                        yield _event(data)
                    if ends_s is not None and time.monotonic() >= ends_s:
                        raise self._given_up()
        except httpx.HTTPError as error:
            raise self._broken(error) from error
        if DONE not in reader.feed(b"\n\n"):  # some servers leave out what ends the last event
            raise _failed("the server's stream ended without [DONE]: the answer may lack its end")

    def _broken(self, error: httpx.HTTPError) -> PenstockError:
        if isinstance(error, httpx.ReadTimeout) and self.timeout_s is not None:
            return self._given_up()
        said = str(error) or type(error).__name__
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return _failed(f"the server at {self.client.base_url} cannot be reached: {said}")
        return _failed(f"the connection to the server broke: {said}")

    def _given_up(self) -> PenstockError:
        return PenstockError(ErrorCode.DEADLINE_EXCEEDED, f"no whole answer within --timeout-s {self.timeout_s:g}")


def _piece(event: Event) -> Piece:
    num_tokens = event.usage.completion_tokens if event.usage else 0
    if not event.choices:
        return Piece(num_tokens=num_tokens)
    return Piece(event.choices[0].content, event.choices[0].reasoning, num_tokens)


def _event(data: bytes) -> Event:
    try:
        event = decode_event(data)
    except msgspec.DecodeError as error:
        raise _failed(f"an event of the server is not as OpenAI's: {error}") from error
    if event.error is not None:
        raise _failed(f"the server ended its answer with an error: {error_text(event.error):.{_ERROR_CHARS}}")
    return event


def _failed(message: str) -> PenstockError:
    return PenstockError(ErrorCode.UNAVAILABLE, message)


def _refused(status: int, body: bytes) -> PenstockError:
    """The error of an answer that is none."""
    text = body.decode("utf-8", "replace")
    try:
        text = error_text(json.loads(text))
    except ValueError:
        text = " ".join(text.split())
    message = f"the server answered {status}: {text:.{_ERROR_CHARS}}".removesuffix(": ")
    if status == httpx.codes.UNAUTHORIZED:
        message += " (its key: --api-key or OPENAI_API_KEY)"
    return invalid(message) if httpx.codes.is_client_error(status) else _failed(message)
