"""Limits of API keys, and how much of them a request counts for."""

from dataclasses import dataclass
from enum import IntEnum


class Limit(IntEnum):
    """A limit of an API key."""

    CALLS = 0  # in a minute
    TOKENS = 1  # in a minute
    RUNNING = 2  # requests at once


@dataclass(frozen=True, slots=True)
class Metered:
    """For which key a request counts, and for how much; 0: no limit.

    Calls and tokens are counted by whole seconds, for a minute and the second that goes on. A request counts for its
    prompt and what it may generate; once it is known, for what it has used: what that is more, counts from then on.
    """

    key: bytes  # 8 bytes that stand for it
    leader: bytes  # the first request of the call: it stands for all of them, and others come only if it has
    rpm: int = 0  # calls in a minute
    tpm: int = 0  # tokens in a minute; a call of more is let in when nothing was used lately
    max_running: int = 0  # requests that have not ended
    tokens: int = 0  # of the request
    call_tokens: int = 0  # of all requests of the call
    call_requests: int = 1


@dataclass(frozen=True, slots=True)
class OverLimit:
    """Refused by `submit`: its key has used what it may."""

    limit: Limit
    # After which the call is let in, unless the key is used otherwise meanwhile; of requests at once, in which one of
    # them ends at the rate of late; 0: none has ended lately.
    wait_ms: int
