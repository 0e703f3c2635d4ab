"""An API: how outputs are asked for over HTTP, and how replies, event streams and errors are told in it."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from contract.domain.errors import PenstockError
from contract.domain.finish import Usage
from contract.domain.rows import TextRow
from gateway_svc.core.ask import Ask, Form, Models
from gateway_svc.core.prompt_outputs import PromptOutput
from gateway_svc.core.replies import ReplyHead
from gateway_svc.core.streams import DeliveredSequence
from gateway_svc.core.unsupported import unknown_field


class PlainReply(Protocol):
    """The plain reply of a call: its rows in, its body out."""

    def learn_prompt(self, choices: Iterable[int], output: PromptOutput) -> None:
        """Take what was computed of the prompt that these choices have, if it is asked for; before their first row."""
        ...

    def add(self, choice: int, row: TextRow) -> None:
        """Take the next row of a choice."""
        ...

    def fields(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """The body; every choice has ended."""
        ...


class EventFormat(Protocol):
    """The event stream of a call: rows in, server-sent events out."""

    def learn(self, choices: Iterable[int], num_prompt_tokens: int) -> None:
        """Take the number of prompt tokens that choices of one request have; before their first row."""
        ...

    def learn_prompt(self, choices: Iterable[int], output: PromptOutput) -> None:
        """Take what was computed of the prompt that these choices have, if it is asked for; before their first row."""
        ...

    def learn_model(self, choices: Iterable[int], model_digest: bytes) -> None:
        """Take the digest of the model that answers choices of one request; before their first row."""
        ...

    def recall(self, choice: int, row: TextRow) -> None:
        """Take a row that the client has already, with all before it: what comes after goes on from there."""
        ...

    def chunk(self, choice: int, row: TextRow, chain: int) -> bytes:
        """The events of a row, which extends the choice's row before; empty: there is nothing to tell yet.

        `chain`: the hash over the choice's tokens, those of the row included.
        """
        ...

    def end(self, usages: Sequence[Usage]) -> bytes:
        """The events after the last row."""
        ...

    def fail(self, error: PenstockError) -> bytes:
        """The end of a stream that fails after its first event."""
        ...


class EventsOf(Protocol):
    """The maker of event streams."""

    def __call__(
        self, head: ReplyHead, request_id: bytes, have: Sequence[DeliveredSequence], *, with_ids: bool = False
    ) -> EventFormat:
        """A stream that begins, or goes on, after what its client has of each choice.

        Args:
            head: of the call.
            request_id: the call's first.
            have: what the client has, by choice.
            with_ids: events have ids.
        """
        ...


ErrorFields = Callable[[PenstockError], dict[str, Any]]  # the body of an error


@dataclass(frozen=True, slots=True)
class Api:
    """One API."""

    form: Form  # by which requests keep it
    paths: tuple[str, ...]  # to which calls are posted; what is below them tells errors alike
    parse: Callable[[bytes, Models], Ask]
    known_fields: Collection[str]  # of bodies
    reply: Callable[[ReplyHead], PlainReply]
    events: EventsOf | None  # None: it has no event streams
    error_fields: ErrorFields
    id_header: bytes = b""  # in which its clients look for the id of a call, beside our own; empty: in none
    numbers_events: bool = False  # their ids say which one each is

    def refusal(self, ask: Ask) -> PenstockError | None:
        """The error of a call with fields that nobody knows, where such are refused; None: it has none."""
        if not ask.ignored_fields:
            return None
        return unknown_field(self.form.value, ask.ignored_fields[0], self.known_fields)
