"""Replies and event streams of APIs that tell an output part by part; what a part looks like is its `PartWriter`'s."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from contract.domain.errors import PenstockError
from contract.domain.finish import Usage
from contract.domain.rows import TextRow
from gateway_svc.core.event_ids import EventIds
from gateway_svc.core.formats.reading import OutputReading
from gateway_svc.core.parts import WHOLE, Moment, Part, Parts, Step, number_at
from gateway_svc.core.prompt_outputs import PromptOutput
from gateway_svc.core.replies import ReplyHead, encode
from gateway_svc.core.streams import DeliveredSequence, merge

Event = tuple[str, dict[str, Any]]  # its type, and what it tells


class PartWriter(Protocol):
    """The words of one API for one output."""

    tells_numbers: bool  # with every event

    def learn(self, num_prompt_tokens: int) -> None:
        """Take the number of tokens of the prompt; before everything else."""
        ...

    def begin(self) -> Sequence[Event]:
        """The events before all parts, up to `parts.PER_CHAR`."""
        ...

    def begin_part(self, part: Part) -> Sequence[Event]:
        """The events with which a part begins, up to two."""
        ...

    def grow(self, part: Part, text: str, start: int, end: int) -> Event:
        """The event of more text in a part, and the stretch of raw text that it was made of."""
        ...

    def end_part(self, part: Part) -> Sequence[Event]:
        """The events with which a part ends, up to three."""
        ...

    def end(self, usage: Usage) -> Sequence[Event]:
        """The events after all parts, up to two."""
        ...

    def fail(self, error: PenstockError) -> Sequence[Event]:
        """The events of a stream that fails, up to two."""
        ...

    def reply(self, usage: Usage) -> dict[str, Any]:
        """The body of a plain reply."""
        ...


class WriterOf(Protocol):
    """The maker of writers."""

    def __call__(self, head: ReplyHead, parts: Parts) -> PartWriter:
        """The words for one output, whose parts will be there when they are to be told."""
        ...


class PartReply:
    """A plain reply."""

    def __init__(self, head: ReplyHead, writer_of: WriterOf) -> None:
        self._parts = Parts(head.reading or OutputReading())
        self._writer = writer_of(head, self._parts)
        self._rows: list[TextRow] = []

    def learn_prompt(self, choices: Iterable[int], output: PromptOutput) -> None:
        """Implement `api.PlainReply`: these APIs have no word for it."""

    def add(self, choice: int, row: TextRow) -> None:  # noqa: ARG002  (there is one)
        """Implement `api.PlainReply`."""
        self._rows.append(row)

    def fields(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """Implement `api.PlainReply`."""
        for _ in self._parts.read(merge(self._rows)):
            pass
        return self._writer.reply(usages[0])


class PartEvents:
    """An event stream. Events have numbers that only rise; one whose number its client has already is not told."""

    def __init__(
        self,
        head: ReplyHead,
        request_id: bytes,
        have: Sequence[DeliveredSequence],
        writer_of: WriterOf,
        *,
        with_ids: bool = False,
    ) -> None:
        """Begins, or goes on, after what the client has."""
        self._parts = Parts(head.reading or OutputReading())
        self._writer = writer_of(head, self._parts)
        self._ids = EventIds(request_id, have) if with_ids else None
        self._last = have[0].last_event
        self._begun = False

    def learn(self, choices: Iterable[int], num_prompt_tokens: int) -> None:  # noqa: ARG002  (there is one)
        """Implement `api.EventFormat`."""
        self._writer.learn(num_prompt_tokens)

    def learn_prompt(self, choices: Iterable[int], output: PromptOutput) -> None:
        """Implement `api.EventFormat`: these APIs have no word for it."""

    def learn_model(self, choices: Iterable[int], model_digest: bytes) -> None:
        """Implement `api.EventFormat`: these APIs have no word for it."""

    def recall(self, choice: int, row: TextRow) -> None:  # noqa: ARG002  (there is one)
        """Implement `api.EventFormat`: all events of such a row were told, or its client would not have it."""
        self._numbered(row)

    def chunk(self, choice: int, row: TextRow, chain: int) -> bytes:
        """Implement `api.EventFormat`: only the id of the last event of a row says that its client has the row."""
        told = self._numbered(row)
        before = self._written(told[:-1])
        num_tokens, num_chars = row.token_offset + len(row.token_ids), row.text_offset + len(row.text)
        if self._ids is not None:
            self._ids.bring(choice, num_tokens, num_chars, chain, row.finish)
        return before + self._written(told[-1:])

    def end(self, usages: Sequence[Usage]) -> bytes:
        """Implement `api.EventFormat`."""
        last = zip(_numbers(number_at(self._parts.size, WHOLE)), self._writer.end(usages[0]), strict=False)
        return self._written(self._unknown([*self._beginning(), *last]))

    def fail(self, error: PenstockError) -> bytes:
        """Implement `api.EventFormat`: to have these events is to have nothing, so they have no ids."""
        numbers = _numbers(max(self._last + 1, number_at(self._parts.place, WHOLE)))
        return b"".join(map(self._write, numbers, self._writer.fail(error)))

    def _numbered(self, row: TextRow) -> list[tuple[int, Event]]:
        """The events of a row that its client does not have, with their numbers."""
        found = list(self._beginning())
        for moment in self._parts.read(row):
            found += zip(_numbers(moment.number), self._events(moment), strict=False)
        return self._unknown(found)

    def _beginning(self) -> Iterator[tuple[int, Event]]:
        if not self._begun:
            self._begun = True
            yield from enumerate(self._writer.begin())

    def _unknown(self, events: Sequence[tuple[int, Event]]) -> list[tuple[int, Event]]:
        return [each for each in events if each[0] > self._last]

    def _events(self, moment: Moment) -> Sequence[Event]:
        match moment.step:
            case Step.BEGIN:
                return self._writer.begin_part(moment.part)
            case Step.END:
                return self._writer.end_part(moment.part)
        piece = moment.piece
        assert piece is not None
        return [self._writer.grow(moment.part, piece.text, piece.start, piece.end)]

    def _written(self, told: Sequence[tuple[int, Event]]) -> bytes:
        if self._ids is None:
            return b"".join(self._write(*each) for each in told)
        return b"".join(self._ids.line(number) + self._write(number, event) for number, event in told)

    def _write(self, number: int, event: Event) -> bytes:
        kind, fields = event
        told = {"type": kind, **fields}
        if self._writer.tells_numbers:
            told["sequence_number"] = number
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode(told))


def _numbers(first: int) -> Iterator[int]:
    yield from range(first, first + 3)
