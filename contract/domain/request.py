"""A request as it enters the pipeline."""

import re
from dataclasses import dataclass
from typing import Any

from contract.domain.errors import invalid
from contract.domain.params import SamplingParams
from contract.domain.pooling import Pooling

MAX_CACHE_SALT_BYTES = 255  # of UTF-8
# Of ids of replies, as OpenAI, Anthropic and vLLM have them.
ID_PREFIXES = ("cmpl-", "chatcmpl-", "resp_", "msg_", "embd-", "pooling-", "score-", "rerank-")
_DIGITS = re.compile("[0-9a-fA-F]{32}")


@dataclass(frozen=True, slots=True)
class Header:
    """The header of every message of a request, made by the gateway."""

    request_id: bytes  # 16 bytes
    tenant: str
    priority: int  # lower is served first
    arrival_ns: int  # Unix time, nanoseconds
    deadline_ns: int  # Unix time, nanoseconds; 0: none
    traceparent: str  # W3C trace context; empty: none
    seed: int  # unsigned 64-bit; drawn by the gateway if the client gave none

    @property
    def trace_id(self) -> str:
        """The id of the trace that the request belongs to, 32 hexadecimal digits; empty: none."""
        return self.traceparent[3:35]


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; further keys of the caller's (name, tool calls) are in `extra`."""

    role: str
    content: str | tuple[dict[str, Any], ...] | None  # text; parts, each with a `type` of "text" and a `text`; or none
    extra: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """Exactly one of text, token ids, messages and a pair is given."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    pair: tuple[str, str] | None = None  # two texts that are scored together
    chat_template_kwargs: dict[str, Any] | None = None  # only with messages
    required_variables: tuple[str, ...] = ()  # of these kwargs, those that the template must read


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request: what the gateway submits."""

    header: Header
    model: str
    prompt: Prompt
    params: SamplingParams
    cache_salt: str = ""  # cached prefixes are found by requests of the tenant with the same salt only
    unsaid: frozenset[str] = frozenset()  # parameters that the caller left to the defaults, which they have
    pooling: Pooling | None = None  # the prompt becomes a vector, and nothing is generated; None: it is


def check_cache_salt(salt: str) -> str:
    """A salt that a caller gave.

    Raises:
        PenstockError: INVALID_ARGUMENT: it is empty or too long.
    """
    if not 1 <= len(salt.encode()) <= MAX_CACHE_SALT_BYTES:
        raise invalid(f"cache_salt must be text of 1 to {MAX_CACHE_SALT_BYTES} bytes", "cache_salt")
    return salt


def format_request_id(request_id: bytes, pool: str = "") -> str:
    """The id as people and logs see it: 32 hexadecimal digits, after the name of its pool if that is to be told."""
    return f"{pool}-{request_id.hex()}" if pool else request_id.hex()


def parse_request_id(text: str) -> bytes:
    """The request of an id, whatever stands before its last dash, a pool or the prefix of a reply among it.

    Raises:
        PenstockError: INVALID_ARGUMENT: not 32 hexadecimal digits.
    """
    digits = _without_prefix(text).rpartition("-")[2]
    if not _DIGITS.fullmatch(digits):
        raise invalid(f"a request id has 32 hexadecimal digits, got {text!r:.60}", "request_id")
    return bytes.fromhex(digits)


def pool_of_request_id(text: str) -> str:
    """The pool that an id names; empty: none."""
    return _without_prefix(text).rpartition("-")[0]


def _without_prefix(text: str) -> str:
    return next((text[len(prefix) :] for prefix in ID_PREFIXES if text.startswith(prefix)), text)
