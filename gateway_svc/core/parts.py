"""An output as parts, each a thought, content or a call: what begins, grows and ends with each row.

Every step has a number that follows from its place in the raw text, however the text was cut on its way. So whichever
gateway goes on with a stream counts alike, and an event's number says which events its client has.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from contract.domain.finish import FinishReason
from contract.domain.rows import TextRow, TokenLogprob
from gateway_svc.core.formats.pieces import Kind, Piece
from gateway_svc.core.formats.reading import OutputReading
from gateway_svc.core.thinking_tokens import ThinkingTokens

PER_CHAR = 8  # numbers for each place: one of growth, three of an end, two of a beginning, two for the whole output
_GROWTH, _END, _BEGINNING, WHOLE = 0, 1, 4, 6


def number_at(place: int, offset: int = 0) -> int:
    """The number of a step after so many characters of raw text; those below `PER_CHAR` are before all text."""
    return PER_CHAR * (place + 1) + offset


class Step(Enum):
    """The steps of a part."""

    BEGIN = "begin"
    GROW = "grow"
    END = "end"


@dataclass(slots=True)
class Part:
    """A part of an output; what is in it grows."""

    index: int  # among all parts
    kind: Kind  # REASONING, CONTENT or CALL
    start: int  # characters of raw text before it
    end: int  # and up to the end of what is known of it
    name: str = ""  # of a call's function
    call: int = 0  # index among calls
    is_whole: bool = False  # it ended before the output was cut
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole of it so far; of a call its arguments."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of one part."""

    step: Step
    part: Part
    number: int  # of its first event
    piece: Piece | None = None  # with which the part grows


class Parts:
    """The parts of one output. Rows come in order from its first token on."""

    __slots__ = ("_reader", "_reading", "_thinking", "all", "finish", "logprobs", "num_calls", "size", "stop_reason")

    def __init__(self, reading: OutputReading) -> None:
        self._reading = reading
        self._reader = reading.reader()
        self._thinking = ThinkingTokens(reading.closing_token_id)
        self.all: list[Part] = []
        self.num_calls = 0
        self.logprobs: list[TokenLogprob] = []
        self.size = 0  # characters of raw text so far
        self.finish = FinishReason.UNSPECIFIED
        self.stop_reason: str | int | None = None  # by which it ended; None: by itself, or by a stop string of ours

    @property
    def place(self) -> int:
        """The characters of raw text up to which all was told."""
        return self._reader.at

    @property
    def num_reasoning_tokens(self) -> int | None:
        """The tokens that it thought with; None: they are not known."""
        return self._thinking.count(self._reader.thoughts)

    def read(self, row: TextRow) -> Iterator[Moment]:
        """The steps that the next row brings; with the last row all parts have ended."""
        self._thinking.add(row.token_ids)
        self.logprobs += row.logprobs
        self.size = row.text_offset + len(row.text)
        for piece in self._reader.feed(row.text):
            yield from self._take(piece)
        if row.finish:
            for piece in self._reader.end():
                yield from self._take(piece)
            self.finish = row.finish
            self.stop_reason = row.stop_reason
            yield from self._end_last(is_whole=row.finish is FinishReason.STOP)

    def logprobs_of(self, start: int, end: int) -> list[TokenLogprob]:
        """Those of the tokens that begin in this stretch of raw text."""
        first = bisect_left(self.logprobs, start, key=_text_offset)
        return self.logprobs[first : bisect_left(self.logprobs, end, lo=first, key=_text_offset)]

    def _take(self, piece: Piece) -> Iterator[Moment]:
        if piece.kind is Kind.REASONING and self._reading.without_reasoning:
            return
        kind = Kind.CALL if piece.kind is Kind.ARGUMENTS else piece.kind
        if piece.kind is Kind.CALL or not self.all or self.all[-1].kind is not kind:
            yield from self._end_last(is_whole=True)
            yield self._begin(kind, piece)
        if piece.kind is Kind.CALL:
            return
        part = self.all[-1]
        part.end = piece.end
        part.pieces.append(piece.text)
        yield Moment(Step.GROW, part, number_at(piece.end, _GROWTH), piece)

    def _begin(self, kind: Kind, piece: Piece) -> Moment:
        part = Part(len(self.all), kind, piece.start, piece.end)
        if kind is Kind.CALL:
            part.name, part.call = piece.text, self.num_calls
            self.num_calls += 1
        self.all.append(part)
        return Moment(Step.BEGIN, part, number_at(piece.start, _BEGINNING))

    def _end_last(self, *, is_whole: bool) -> Iterator[Moment]:
        if self.all:
            part = self.all[-1]
            part.is_whole = is_whole
            yield Moment(Step.END, part, number_at(part.end, _END))


def _text_offset(logprob: TokenLogprob) -> int:
    return logprob.text_offset
