"""What one client asked for, what it has of it, and where the rest goes."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from gateway_svc.core.streams import ClientStream
from penstock.domain.errors import PenstockError
from penstock.domain.finish import Usage
from penstock.domain.request import Request
from penstock.domain.rows import TextRow

PROBE_S = 2.0  # a request that is silent for so long asks again for its text, then half as often each time


class Sink(Protocol):
    """Where the text of a call goes. Nothing here waits, and nothing is called after `fail` or the last row."""

    @property
    def has_room(self) -> bool:
        """Whether a row can be taken; if not, `Delivery.refill` is called when it can."""
        ...

    def take(self, prompt: int, row: TextRow, chain: int) -> None:
        """The next row of the prompt with this index; the hash is over its sample's tokens, the row's included."""
        ...

    def end(self, usages: Sequence[Usage]) -> None:
        """All requests of the call have ended, and used this; the last row was taken."""
        ...

    def fail(self, error: PenstockError) -> None:
        """The call ends with an error."""
        ...


class Served:
    """One request of a call."""

    __slots__ = ("call", "is_behind", "last_s", "next_attach_s", "probe_s", "prompt", "request_id", "stream", "usage")

    def __init__(self, call: "Call", prompt: int, request: Request) -> None:
        self.call = call
        self.prompt = prompt
        self.request_id = request.header.request_id
        self.stream = ClientStream(request.params.n)
        self.usage = Usage()  # once it has ended
        self.is_behind = False  # the client is slow and rows were let go
        self.last_s = 0.0  # when tokens last came
        self.next_attach_s = 0.0
        self.probe_s = PROBE_S


class Call:
    """What one client asked for: one request, or one for each of its prompts."""

    __slots__ = ("accepted_s", "deadline", "is_over", "is_submitted", "num_open", "served", "sink", "tenant")

    def __init__(self, requests: Sequence[Request], sink: Sink, now_s: float) -> None:
        self.sink = sink
        self.tenant = requests[0].header.tenant
        self.served = [Served(self, prompt, request) for prompt, request in enumerate(requests)]
        self.num_open = len(requests)
        self.accepted_s = now_s
        self.is_submitted = False
        self.is_over = False
        self.deadline: asyncio.TimerHandle | None = None
