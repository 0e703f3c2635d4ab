"""Event streams of OpenAI's API, as clients read them."""

from typing import Any

import msgspec

DONE = b"[DONE]"  # the data of a stream's last event


class DataReader:
    """The data of server-sent events, however their bytes are cut; other fields and comments are passed over."""

    def __init__(self) -> None:
        self._rest = b""  # of a line
        self._lines: list[bytes] = []  # of an event's data

    def feed(self, part: bytes) -> list[bytes]:
        """Takes more bytes of the stream; the data of each event that they end."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        return [data for line in lines if (data := self._take(line.removesuffix(b"\r")))]

    def _take(self, line: bytes) -> bytes:
        """The data of the event that this line ends; empty: it ends none, or one without data."""
        if line.startswith(b"data:"):
            self._lines.append(line[5:].removeprefix(b" "))
        if line:
            return b""
        data = b"\n".join(self._lines)
        self._lines.clear()
        return data


class Usage(msgspec.Struct):
    """Tokens as the server counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Choice(msgspec.Struct):
    """The part of an event that an output gets: text of a completion, or the delta of a chat."""

    text: str | None = None
    delta: dict[str, Any] | None = None

    @property
    def has_output(self) -> bool:
        """Return whether it tells something that the model wrote; a role alone, or an end, is nothing."""
        told = self.delta or {}
        return bool(self.text) or any(
            told.get(key) for key in ("content", "reasoning", "reasoning_content", "tool_calls")
        )

    @property
    def content(self) -> str:
        """More of the output's text; a refusal is text too."""
        return self.text or self._told("content", "refusal")

    @property
    def reasoning(self) -> str:
        """More of the thoughts before a chat's output, by either of the names that servers give them."""
        return self._told("reasoning", "reasoning_content")

    def _told(self, *keys: str) -> str:
        told = self.delta or {}
        return next((text for key in keys if isinstance(text := told.get(key), str) and text), "")


class Event(msgspec.Struct):
    """An event of a completion or a chat."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None  # of a stream that failed after it began


decode_event = msgspec.json.Decoder(Event).decode


def error_text(found: Any) -> str:
    """The message of an error as servers tell it, in one line: OpenAI's object, and what others have instead."""
    while isinstance(found, dict):
        found = next((found[key] for key in ("error", "message", "detail") if found.get(key)), str(found))
    return " ".join(str(found).split())
