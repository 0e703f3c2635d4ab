"""One sample of a request: its tokens, its text and its end."""

from array import array
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from detokenizer_svc.core.decoder import TextDecoder
from detokenizer_svc.core.logprobs import LogprobLog, RowLogprobs
from detokenizer_svc.core.request import FinishedSequence, OpenRequest
from detokenizer_svc.core.stops import StopStrings
from detokenizer_svc.core.textrows import SequenceEnd, TextRows
from penstock.domain import chain
from penstock.domain.finish import FinishReason, RequestError, Usage

Offset = tuple[int, int]  # what a client has of a sequence: output tokens, characters of text

_NO_PIECES: dict[int, str] = {}


@dataclass(frozen=True, slots=True)
class Arrival:
    """What an accepted row brings: the next tokens and perhaps an end."""

    token_ids: list[int]  # the next of the sequence
    finish: FinishReason  # UNSPECIFIED: it goes on
    error: RequestError | None  # with finish ERROR
    logprobs: RowLogprobs | None  # of the whole batch
    first_token: int  # where in the batch `token_ids` begin


class Sequence:
    """Grows by tokens, one decision a token: how rows cut the tokens changes neither text nor end."""

    __slots__ = (
        "chain",
        "decoder",
        "end",
        "index",
        "logprobs",
        "num_chars",
        "parts",
        "pieces",
        "request",
        "state",
        "stops",
        "text_ends",
        "token_ids",
    )

    def __init__(self, request: OpenRequest, index: int, decoder: TextDecoder) -> None:
        self.request = request
        self.index = index
        self.decoder = decoder
        self.state: Any = decoder.start()
        self.token_ids = array("I")
        self.text_ends = array("I")  # per token: characters of text once it was added
        self.chain = chain.CHAIN_START
        self.parts: list[str] = []
        self.num_chars = 0
        self.end: SequenceEnd | None = None
        options = request.text
        self.stops = (
            StopStrings(options.stop, include_in_output=options.include_stop_str_in_output) if options.stop else None
        )
        self.logprobs = LogprobLog() if request.wants_logprobs else None
        # What the hot loop may look up by itself: nothing, if each token needs more than its text.
        self.pieces = decoder.pieces if self.stops is None and self.logprobs is None else _NO_PIECES

    def text(self, start: int = 0) -> str:
        """The text from character `start` on."""
        return "".join(self.parts)[start:]

    def extend(self, arrival: Arrival) -> str:
        """Adds the next tokens, then the end that their row brings, unless a stop string came before it.

        Returns:
            The text that this adds.
        """
        token_ids = arrival.token_ids
        finish = arrival.finish
        parts: list[str] = []
        num_taken = 0
        stop: str | None = None
        stop_token = len(token_ids) - 1 if finish is FinishReason.STOP else -1
        for token_id in token_ids:
            hidden = num_taken == stop_token and not self.request.text.include_stop_str_in_output
            piece, stop = ("", None) if hidden else self._text_of(token_id)
            if piece:
                parts.append(piece)
                self.num_chars += len(piece)
            self.token_ids.append(token_id)
            self.text_ends.append(self.num_chars)
            if self.logprobs is not None:
                if arrival.logprobs is None:
                    self.logprobs.pad(len(self.token_ids))
                else:
                    arrival.logprobs.add_to(self.logprobs, arrival.first_token + num_taken, token_id)
            num_taken += 1
            if stop is not None:
                break
        self.chain = chain.extend(self.chain, token_ids[:num_taken])
        if stop is not None:
            self._finish(SequenceEnd(FinishReason.STOP, stop))
        elif finish is not FinishReason.UNSPECIFIED:
            parts.append(self._flush(arrival))
        added = "".join(parts)
        self.parts.append(added)
        return added

    def add_behind(self, rows: TextRows, offset: Offset) -> None:
        """Adds the row of everything that lies behind what a client has; no row if there is nothing.

        A client that has more tokens than are known here gets nothing until the log has caught up.
        """
        num_tokens, num_chars = offset
        known = len(self.token_ids)
        if num_tokens > known or (num_tokens == known and self.end is None):
            return
        text_offset = self.text_ends[num_tokens - 1] if num_tokens else 0
        if num_tokens == known:
            # Text that was held back comes with the end, behind the last token.
            text_offset = min(max(text_offset, num_chars), self.num_chars)
        token_ids = self.token_ids.tolist()
        rows.add(
            self.request.request_id,
            self.index,
            token_offset=num_tokens,
            text_offset=text_offset,
            chain=chain.extend(chain.CHAIN_START, token_ids[:num_tokens]),
            token_ids=token_ids[num_tokens:],
            text=self.text(text_offset),
            end=self.end,
            logprobs=self.logprobs,
        )

    def finished(self, usage: Usage) -> FinishedSequence:
        """The result of a sequence that has ended; `usage` is the request's."""
        if self.end is None:
            raise RuntimeError("a sequence that goes on has no result")
        return FinishedSequence(
            text=self.text(),
            token_ids=np.array(self.token_ids, np.uint32),
            logprobs=self.logprobs,
            end=replace(self.end, usage=usage),
        )

    def _text_of(self, token_id: int) -> tuple[str, str | None]:
        piece, self.state = self.decoder.step(self.state, token_id)
        if self.stops is None:
            return piece, None
        return self.stops.feed(piece, search=len(self.token_ids) >= self.request.min_tokens)

    def _flush(self, arrival: Arrival) -> str:
        """Ends the sequence by its row; what was held back is text after all, and may complete a stop string."""
        text = self.decoder.flush(self.state)
        stop: str | None = None
        if self.stops is not None:
            text, stop = self.stops.feed(text, search=len(self.token_ids) > self.request.min_tokens)
            if stop is None:
                text += self.stops.release()
        self.num_chars += len(text)
        if stop is not None:
            self._finish(SequenceEnd(FinishReason.STOP, stop))
        elif arrival.finish is FinishReason.STOP and arrival.token_ids:
            self._finish(SequenceEnd(FinishReason.STOP, self.request.stop_reason(arrival.token_ids[-1])))
        else:
            self._finish(SequenceEnd(arrival.finish, error=arrival.error))
        return text

    def _finish(self, end: SequenceEnd) -> None:
        self.end = end
        self.pieces = _NO_PIECES
