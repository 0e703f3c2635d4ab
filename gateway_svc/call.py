"""One client's call: its requests, what the client has of them, and where the rest goes."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from contract.domain.errors import PenstockError
from contract.domain.finish import Usage
from contract.domain.histogram import Exemplar
from contract.domain.rows import TextRow
from gateway_svc.core.prompt_outputs import PromptOutput
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.streams import ClientStream, DeliveredSequence, Refusal, before
from servicekit.bus.calls import KeepPromptOutput, Submit

PROBE_S = 2.0  # a request that is silent for so long asks again for its text, then half as often each time


class Sink(Protocol):
    """The receiver of a call's text. Nothing here waits, and nothing is called after `fail` or the last row."""

    @property
    def has_room(self) -> bool:
        """Return whether a row can be taken; if not, `Delivery.refill` is called when it can."""
        ...

    def learn(self, prompt: int, num_prompt_tokens: int) -> None:
        """Take the number of tokens of the prompt with this index; before its first row."""
        ...

    def learn_model(self, prompt: int, model_digest: bytes) -> None:
        """Take the digest of the model that answers the prompt with this index; before its first row."""
        ...

    def learn_prompt(self, prompt: int, output: PromptOutput) -> None:
        """Take what was computed of the prompt with this index, if it was asked for; before its first row."""
        ...

    def recall(self, prompt: int, row: TextRow) -> None:
        """The next row, or a part of one, that the client has already: of a call whose text is not told as it is."""
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


class NoClient:
    """The sink of a call whose client is gone and may come back."""

    has_room = True

    def learn(self, prompt: int, num_prompt_tokens: int) -> None:
        """Nobody is told."""

    def learn_model(self, prompt: int, model_digest: bytes) -> None:
        """Nobody is told."""

    def learn_prompt(self, prompt: int, output: PromptOutput) -> None:
        """Nobody is told."""

    def recall(self, prompt: int, row: TextRow) -> None:
        """Nobody is told."""

    def take(self, prompt: int, row: TextRow, chain: int) -> None:
        """Nothing is kept: who comes back says what it has."""

    def end(self, usages: Sequence[Usage]) -> None:
        """The result is kept by the pool."""

    def fail(self, error: PenstockError) -> None:
        """The pool knows."""


class Served:
    """One request of a call."""

    __slots__ = (
        *(
            "call",
            "exemplar",
            "is_behind",
            "is_taken",
            "last_s",
            "next_attach_s",
            "probe_s",
            "prompt",
            "reader",
            "request_id",
            "route",
        ),
        *("model_digest", "num_prompt_tokens", "prompt_output", "stream", "submission", "usage"),
    )

    def __init__(
        self, call: "ClientCall", prompt: int, stream: ClientStream, route: bytes, reader: ClientStream | None = None
    ) -> None:
        """`reader` follows the text from its start, if what the client has of it must be read again."""
        self.call = call
        self.reader = reader
        self.prompt = prompt
        self.request_id = call.form.request_ids[prompt]
        self.exemplar = Exemplar(self.request_id)  # of latencies: whose they are
        self.stream = stream
        self.route = route  # the gateway session that has it: ours, or the one that we were
        self.is_taken = True  # it is ours by submitting or attaching; if not yet, whoever has it must give it
        self.submission: Submit | None = None  # how it was submitted; None: by another gateway, or not yet
        self.usage = Usage()  # once it has ended
        self.num_prompt_tokens = 0  # once it is known
        self.model_digest = b""  # of the model that answers it, once it is known
        self.prompt_output: KeepPromptOutput | None = None  # as the client was told it, if it asked
        self.is_behind = False  # the client is slow and rows were let go
        self.last_s = 0.0  # when tokens last came
        self.next_attach_s = 0.0
        self.probe_s = PROBE_S

    def offsets(self) -> list[DeliveredSequence]:
        """From where the request's text is to go on, by sample."""
        return (self.reader or self.stream).offsets()

    def accept(self, row: TextRow) -> TextRow | Refusal:
        """Take a row if it extends what the client has; the part of it that is new is the answer."""
        if self.reader is None:
            return self.stream.accept(row)
        read = self.reader.accept(row)
        if isinstance(read, Refusal):
            return read
        taken = self.stream.accept(read)
        known = read if taken is Refusal.KNOWN else None if isinstance(taken, Refusal) else before(read, taken)
        if known is not None:
            self.call.sink.recall(self.prompt, known)
        return taken


class ClientCall:
    """The call of one client: one request, or one for each of its prompts."""

    __slots__ = (
        *(
            "accepted_s",
            "came_ms",
            "client_id",
            "deadline",
            "form",
            "grace",
            "is_over",
            "is_submitted",
            "num_open",
            "served",
            "sink",
        ),
        "tenant",
    )

    def __init__(
        self,
        form: ReplyForm,
        tenant: str,
        sink: Sink,
        *,
        route: bytes,
        now_s: float,
        came_ms: int,
        have: Sequence[DeliveredSequence] | None = None,
    ) -> None:
        """A call that begins, or goes on after what its client has of each choice.

        Args:
            form: how it is answered.
            tenant: whose it is.
            sink: gets its text.
            route: the gateway session that serves it.
            now_s: when its client came, by the loop's clock.
            came_ms: the same by the server's clock.
            have: what its client has of each choice; None: nothing.
        """
        self.form = form
        self.tenant = tenant
        self.sink = sink
        self.served = [
            Served(
                self,
                prompt,
                ClientStream(form.n, have and have[prompt * form.n : (prompt + 1) * form.n]),
                route,
                ClientStream(form.n) if have and form.reading is not None else None,
            )
            for prompt in range(len(form.request_ids))
        ]
        self.num_open = len(self.served)
        self.accepted_s = now_s
        self.came_ms = came_ms
        self.client_id = ""  # what the client calls it
        self.is_submitted = False
        self.is_over = False
        self.deadline: asyncio.TimerHandle | None = None
        self.grace: asyncio.TimerHandle | None = None  # runs while its client is gone
