"""Streams as their clients saw them."""

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from bench.rig.chaos.recipes import Recipe


class End(Enum):
    """The end of a stream as its client saw it."""

    DONE = "done"
    LEFT = "left"  # the client went away, as it meant to
    BROKEN = "broken"  # the connection broke
    FAILED = "failed"  # a typed error
    SILENT = "silent"  # nothing came for too long
    REFUSED = "refused"  # never accepted: the gateway was not there


@dataclass
class Sample:
    """One sample as its client saw it."""

    token_ids: list[int] = field(default_factory=list)  # over HTTP only where they are told
    text: str = ""
    reasoning: str = ""  # of a chat
    calls: str = ""  # of a chat: for each its index, its id if that is not the derived one, its name and arguments
    finish: str = ""
    stop_reason: int | str | None = None
    logprobs: list[float] = field(default_factory=list)  # of each token, and after it its alternatives'
    events: list[dict[str, Any]] = field(default_factory=list)  # of APIs that tell it part by part


@dataclass
class Story:
    """One stream as its client saw it."""

    recipe: Recipe
    gateway: str
    begun_s: float
    samples: list[Sample]
    request_id: str = ""
    event_times_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    end: End = End.SILENT
    error: str = ""  # the last one
    errors: list[tuple[float, str]] = field(default_factory=list)  # all, those that its client got over too, and when
    usage: tuple[int, int] | None = None  # prompt and output tokens
    num_repeats: int = 0  # events that begin before the end of what came already
    num_gaps: int = 0  # events that begin after it
    last_event_id: str = ""  # over HTTP
    num_reconnects: int = 0  # over HTTP
    num_refusals: int = 0  # 429 or 503, after which the request was sent again with its key
    refused_s: float = 0.0  # when it was last told to come again later
    prompt_ids: tuple[int, ...] = ()  # as they were told
    fingerprints: set[str] = field(default_factory=set)  # of models, over HTTP
    # Of each token of the prompt but the first, by token: logprob and rank.
    prompt_logprobs: list[dict[int, tuple[float, int | None]]] = field(default_factory=list)
    vector: list[float] = field(default_factory=list)  # of the prompt

    @property
    def heard_s(self) -> float:
        """The time at which something was last heard of it."""
        return max(self.begun_s, self.refused_s, *self.event_times_s[-1:])

    def fail(self, end: End, error: str) -> None:
        """It has come to this end, unless its client gets over the error."""
        self.end, self.error = end, error
        self.errors.append((time.monotonic(), error))

    def refuse(self) -> None:
        """It was told to come again later."""
        self.num_refusals += 1
        self.refused_s = time.monotonic()
