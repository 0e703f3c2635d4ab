"""One sample of a request: its tokens, its text and its end."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from contract.domain import chain
from contract.domain.errors import stream_diverged
from contract.domain.finish import FinishReason, RequestError, Usage
from contract.texts.decoder import TextDecoder
from detokenizer_svc.core.logprobs import LogprobLog, RowLogprobs
from detokenizer_svc.core.request import FinishedSequence, OpenRequest
from detokenizer_svc.core.stops import StopStrings
from detokenizer_svc.core.textrows import NewRow, SequenceEnd


class Offset(NamedTuple):
    """The part of a sequence that a client has."""

    num_tokens: int = 0
    num_chars: int = 0
    chain: int | None = None  # hash over those tokens; None: nobody looks


def _needs_more(token_id: int) -> str | None:  # noqa: ARG001  stands in for a lookup that finds nothing
    return None


@dataclass(frozen=True, slots=True)
class Arrival:
    """The news of an accepted row: the next tokens and perhaps an end."""

    token_ids: list[int]  # the next of the sequence
    finish: FinishReason  # UNSPECIFIED: it goes on
    error: RequestError | None = None  # with finish ERROR
    logprobs: RowLogprobs | None = None  # of the whole batch
    first_token: int = 0  # where in the batch `token_ids` begin


@dataclass(frozen=True, slots=True)
class Told:
    """The end that the log has told of a sequence, whatever was made of it."""

    finish: FinishReason
    error: RequestError | None
    has_tokens: bool  # whether the row had tokens that were new: the last one may be hidden


class Sequence:
    """Grows by tokens, one decision a token: how rows cut the tokens changes neither text nor end.

    Attributes that the hot loop reads and writes by itself: `route`, `chain`, `piece`, `num_chars`, `token_ids` and
    `parts`.
    """

    __slots__ = (
        "_decoder",
        "_is_plain",
        "_num_decoded",
        "_state",
        "_stops",
        "chain",
        "end",
        "index",
        "logprobs",
        "num_chars",
        "parts",
        "piece",
        "request",
        "route",
        "token_ids",
        "told",
    )

    def __init__(self, request: OpenRequest, index: int, decoder: TextDecoder, route: bytes = b"") -> None:
        self.request = request
        self.index = index
        self.route = route  # who gets its rows
        self.token_ids = array("I")
        self.chain = chain.CHAIN_START
        self.parts: list[str] = []  # of its text
        self.num_chars = 0
        self._num_decoded = 0  # characters that its tokens made certain, held back or not; counted for logprobs
        self.end: SequenceEnd | None = None
        self.told: Told | None = None
        self.logprobs = LogprobLog() if request.wants_logprobs else None
        options = request.text
        self._stops = (
            StopStrings(options.stop, include_in_output=options.include_stop_str_in_output) if options.stop else None
        )
        self._is_plain = self._stops is None and self.logprobs is None
        self._decoder = decoder
        self._state: Any = None
        # The text of a token where a table has it and adding it is all that there is to do, else None.
        self.piece: Callable[[int], str | None] = _needs_more
        self._settle(decoder.start())

    def text(self, start: int = 0) -> str:
        """The text from character `start` on."""
        return "".join(self.parts)[start:]

    def step(self, token_id: int) -> str | None:
        """The text that a next token adds where that is all that there is to it; None: it needs `extend`."""
        if self._stops is not None and self._state is None and self.logprobs is None and self.end is None:
            text = self._decoder.pieces.get(token_id)
            return text if text is not None and self._stops.passes(text) else None
        if not self._is_plain or token_id < 0:
            return None
        text, state = self._decoder.step(self._state, token_id)
        self._settle(state)
        return text

    def extend(self, arrival: Arrival) -> str:
        """Adds the next tokens, then the end that their row brings, unless a stop string came before it.

        Returns:
            The text that this adds.
        """
        hidden = len(arrival.token_ids) - 1 if self._hides_last(arrival) else -1
        num_tokens = len(self.token_ids) + len(arrival.token_ids)
        parts: list[str] = []
        state = self._state
        stop: str | None = None
        for i, token_id in enumerate(arrival.token_ids):
            text_offset = self._num_decoded
            if i != hidden:
                piece, state = self._decoder.step(state, token_id)
                if self.logprobs is not None:
                    self._num_decoded += len(piece)
                if self._stops is not None:
                    piece, stop = self._stops.feed(piece, search=len(self.token_ids) >= self.request.min_tokens)
                parts.append(piece)
            self.token_ids.append(token_id)
            if self.logprobs is not None and arrival.logprobs is not None:
                arrival.logprobs.add_to(self.logprobs, arrival.first_token + i, token_id, text_offset)
            elif self.logprobs is not None:
                self.logprobs.pad(len(self.token_ids))
            if stop is not None:
                break
        self._settle(state)
        num_left = num_tokens - len(self.token_ids)  # after a stop string
        self.chain = chain.extend(self.chain, arrival.token_ids[: len(arrival.token_ids) - num_left])
        if arrival.finish and not num_left:
            self.told = Told(arrival.finish, arrival.error, bool(arrival.token_ids))
        if stop is not None:
            self._finish(SequenceEnd(FinishReason.STOP, stop))
        elif arrival.finish is not FinishReason.UNSPECIFIED:
            parts.append(self._flush(arrival))
        added = "".join(parts)
        if added:
            self.parts.append(added)
            self.num_chars += len(added)
        return added

    def end_by_count(self, token_id: int, text: str) -> SequenceEnd:
        """Adds the last token, for which `piece` has this text: what `extend` does where that is all there is to do."""
        self.token_ids.append(token_id)
        self.chain = chain.extend(self.chain, (token_id,))
        if text:
            self.parts.append(text)
            self.num_chars += len(text)
        self.told = Told(FinishReason.LENGTH, None, has_tokens=True)
        end = SequenceEnd(FinishReason.LENGTH)
        self._finish(end)
        return end

    def rest(self, offset: Offset) -> NewRow | None:
        """The row of everything that lies after what a client has; None if there is nothing.

        A client that has more tokens than are known here gets nothing until the log has caught up. One whose tokens are
        of another history, which Redis lost and nobody remembered, gets an end with STREAM_DIVERGED after them.
        """
        num_tokens, num_chars, chain_of_client = offset
        known = len(self.token_ids)
        if num_tokens > known:
            return self._diverged(offset) if self.end is not None else None
        token_ids = self.token_ids.tolist()
        chain_before = self.chain if num_tokens == known else chain.extend(chain.CHAIN_START, token_ids[:num_tokens])
        if chain_of_client not in (None, chain_before):
            return self._diverged(offset)
        if num_tokens == known and self.end is None:
            return None
        text_offset = self._num_chars_after(token_ids[:num_tokens])
        if num_tokens == known:
            # Text that was held back comes with the end, after the last token.
            text_offset = min(max(text_offset, num_chars), self.num_chars)
        return NewRow(
            request_id=self.request.request_id,
            sequence=self.index,
            token_offset=num_tokens,
            text_offset=text_offset,
            chain=chain_before,
            token_ids=token_ids[num_tokens:],
            text=self.text(text_offset),
            end=self.end,
            logprobs=self.logprobs,
            num_prompt_tokens=self.request.num_prompt_tokens,
        )

    def _diverged(self, offset: Offset) -> NewRow:
        return NewRow(
            request_id=self.request.request_id,
            sequence=self.index,
            token_offset=offset.num_tokens,
            text_offset=offset.num_chars,
            chain=self.chain if offset.chain is None else offset.chain,
            token_ids=[],
            text="",
            end=SequenceEnd(FinishReason.ERROR, error=RequestError.of(stream_diverged())),
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

    def _hides_last(self, arrival: Arrival) -> bool:
        """Return whether the last token is EOS or a stop token that has no text."""
        return arrival.finish is FinishReason.STOP and not self.request.text.include_stop_str_in_output

    def _settle(self, state: Any) -> None:
        self._state = state
        self.piece = self._decoder.pieces.get if state is None and self._is_plain else _needs_more

    def _flush(self, arrival: Arrival) -> str:
        """Ends the sequence by its row; what was held back is text after all, and may complete a stop string."""
        text = self._decoder.flush(self._state)
        stop: str | None = None
        if self._stops is not None:
            text, stop = self._stops.feed(text, search=len(self.token_ids) > self.request.min_tokens)
            if stop is None:
                text += self._stops.release()
        if stop is not None:
            self._finish(SequenceEnd(FinishReason.STOP, stop))
        elif arrival.finish is FinishReason.STOP and arrival.token_ids:
            self._finish(SequenceEnd(FinishReason.STOP, self.request.stop_reason(arrival.token_ids[-1])))
        else:
            self._finish(SequenceEnd(arrival.finish, error=arrival.error))
        return text

    def _finish(self, end: SequenceEnd) -> None:
        self.end = end
        self._is_plain = False
        self.piece = _needs_more

    def _num_chars_after(self, token_ids: list[int]) -> int:
        """Characters of text once the first tokens were added: they are added again, to a sequence of the same kind.

        Remembering it for every token would cost the hot loop more than clients that come back do.
        """
        if len(token_ids) == len(self.token_ids) and self.end is None:
            return self.num_chars
        past = Sequence(self.request, self.index, self._decoder)
        past.extend(Arrival(token_ids[:-1], FinishReason.UNSPECIFIED))
        if token_ids:
            # The token that completed the end may have no text of its own.
            ended = self.end if len(token_ids) == len(self.token_ids) else None
            hidden = ended is not None and ended.reason is FinishReason.STOP and not isinstance(ended.stop_reason, str)
            if not (hidden and not self.request.text.include_stop_str_in_output):
                past.extend(Arrival(token_ids[-1:], FinishReason.UNSPECIFIED))
        return past.num_chars
