"""Token rows become text rows: accepted by position and hash, decided from the log alone."""

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import numpy as np
from tokenizers import Tokenizer

from detokenizer_svc.core.choice import choose_decoder
from detokenizer_svc.core.decoder import TextDecoder
from detokenizer_svc.core.logprobs import RowLogprobs
from detokenizer_svc.core.request import FinishedRequest, OpenRequest, Retirement
from detokenizer_svc.core.sequence import Arrival, Offset, Sequence
from detokenizer_svc.core.textrows import TextRows
from penstock.domain import chain
from penstock.domain.finish import CancelReason, FinishReason, Usage
from penstock.domain.rows import TextRow, TokenRows

_ENDED_REMEMBERED = 65_536
_GOES_ON = FinishReason.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class Cancellation:
    """A sequence whose end is decided here, so that its scheduler need not go on with it."""

    request_id: bytes
    sequence: int
    reason: CancelReason = CancelReason.STOP


@dataclass(slots=True)
class Effects:
    """What is to be done after a change, in this order: texts, cancels, retirements."""

    texts: dict[bytes, TextRows] = field(default_factory=dict)  # by route
    retirements: list[Retirement] = field(default_factory=list)
    cancels: list[Cancellation] = field(default_factory=list)

    def rows(self) -> Iterator[TextRow]:
        """All text rows, whatever their route."""
        for rows in self.texts.values():
            yield from rows.rows()
        for retirement in self.retirements:
            yield from retirement.rows.rows()

    def rows_for(self, route: bytes) -> TextRows:
        """The rows of a route, to add to."""
        rows = self.texts.get(route)
        if rows is None:
            rows = self.texts[route] = TextRows()
        return rows


@dataclass(slots=True)
class DetokenizerStats:
    """Counts since the start."""

    num_tokens: int = 0  # added to sequences
    num_duplicate_rows: int = 0  # brought nothing new
    num_gap_rows: int = 0  # began behind what is known
    num_spliced_rows: int = 0  # of another history
    num_ended_rows: int = 0  # behind a sequence's end
    num_unknown_rows: int = 0  # of a request that was never opened here
    num_live_requests: int = 0


@dataclass(slots=True)
class _Live:
    """A request that goes on."""

    opened: OpenRequest
    route: bytes
    sequences: list[Sequence]
    num_ended: int = 0
    num_cached_tokens: int = 0


class Detokenizer:
    """The live requests of one process; not safe for several threads.

    Feed it `open` and `push` in the order of the log. The same log gives the same texts, ends and results, however its
    rows are cut, doubled or grouped into pushes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decoders: dict[bool, TextDecoder] = {
            skip: choose_decoder(tokenizer, skip_special_tokens=skip) for skip in (True, False)
        }
        self._token_bytes: dict[int, bytes] = {}
        self._live: dict[bytes, _Live] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._stats = DetokenizerStats()

    @property
    def stats(self) -> DetokenizerStats:
        """Counts since the start; `num_live_requests` is of now."""
        self._stats.num_live_requests = len(self._live)
        return self._stats

    def __contains__(self, request_id: bytes) -> bool:
        return request_id in self._live

    def live_requests(self) -> Iterator[bytes]:
        """Ids of the requests that go on, in the order in which they were opened."""
        return iter(self._live)

    def open(self, opened: OpenRequest, route: bytes = b"") -> None:
        """A request's first appearance; a second one changes nothing.

        Args:
            opened: the request.
            route: who gets its text rows.
        """
        request_id = opened.request_id
        if request_id in self._live or request_id in self._ended:
            return
        decoder = self._decoders[opened.text.skip_special_tokens]
        sequences = [Sequence(opened, index, decoder) for index in range(opened.n)]
        self._live[request_id] = _Live(opened, route, sequences)

    def forget(self, request_id: bytes) -> None:
        """Drops a request that someone else ended, or whose shard was lost."""
        self._live.pop(request_id, None)

    def push(self, rows: TokenRows) -> Effects:
        """Takes rows of the log; each that extends its sequence becomes one text row."""
        effects = Effects()
        live = self._live
        stats = self._stats
        chains_after = _chains_after(rows)
        token_ids: list[int] = rows.token_ids.tolist()
        logprobs = None if rows.logprobs is None else RowLogprobs(rows.logprobs, self.token_bytes)
        cached: list[int] = rows.cached_tokens.tolist() if rows.cached_tokens.any() else []
        start = 0
        row = -1
        for request_id, index, position, chain_before, count, finish, chain_after in zip(
            rows.request_ids,
            rows.sequences.tolist(),
            rows.positions.tolist(),
            rows.chains.tolist(),
            rows.counts.tolist(),
            rows.finishes.tolist(),
            chains_after,
            strict=True,
        ):
            row += 1
            first_token = start
            start += count
            request = live.get(request_id)
            if request is None or index >= request.opened.n:
                self._count_stray(request_id)
                continue
            sequence = request.sequences[index]
            # One token whose text depends on nothing, extending what is known: nearly every row.
            if (
                count == 1
                and not finish
                and sequence.state is None
                and chain_before == sequence.chain
                and position == len(sequence.token_ids)
                and (text := sequence.pieces.get(token_ids[first_token])) is not None
            ):
                token_id = token_ids[first_token]
                out = effects.rows_for(request.route)
                num_chars = sequence.num_chars
                out.request_ids.append(request_id)
                out.sequences.append(index)
                out.token_offsets.append(position)
                out.text_offsets.append(num_chars)
                out.chains.append(chain_before)
                out.counts.append(1)
                out.token_ids.append(token_id)
                out.texts.append(text)
                sequence.num_chars = num_chars = num_chars + len(text)
                sequence.token_ids.append(token_id)
                sequence.text_ends.append(num_chars)
                sequence.parts.append(text)
                sequence.chain = chain_after
                stats.num_tokens += 1
            else:
                tokens = self._new_tokens(sequence, position, chain_before, token_ids[first_token:start], finish)
                if tokens is None:
                    continue
                arrival = Arrival(tokens, FinishReason(finish), rows.errors.get(row), logprobs, start - len(tokens))
                self._extend(effects, request, sequence, arrival)
            if cached and cached[row] > request.num_cached_tokens:
                request.num_cached_tokens = cached[row]
        return effects

    def attach(self, request_id: bytes, route: bytes, offsets: SequenceOf[Offset] = ()) -> Effects:
        """Sends a live request's text to `route` from now on, beginning with what lies behind the offsets.

        Args:
            request_id: of a request that may have ended: then nothing happens, its result is stored elsewhere.
            route: who gets its text rows.
            offsets: what the client has of each sequence; missing ones are (0, 0).
        """
        effects = Effects()
        request = self._live.get(request_id)
        if request is not None:
            request.route = route
            if len(rows := self.snapshot(request_id, offsets)):
                effects.texts[route] = rows
        return effects

    def snapshot(self, request_id: bytes, offsets: SequenceOf[Offset] = ()) -> TextRows:
        """What a live request has behind the given offsets, one row for each sequence that has anything."""
        rows = TextRows()
        request = self._live.get(request_id)
        for sequence in request.sequences if request is not None else ():
            sequence.add_behind(rows, offsets[sequence.index] if sequence.index < len(offsets) else (0, 0))
        return rows

    def token_bytes(self, token_id: int) -> bytes:
        """What a token alone stands for, special tokens included; may be a part of a character."""
        data = self._token_bytes.get(token_id)
        if data is None:
            data = self._token_bytes[token_id] = self._decoders[False].token_bytes(token_id)
        return data

    def _count_stray(self, request_id: bytes) -> None:
        if request_id in self._ended:
            self._stats.num_ended_rows += 1
        else:
            self._stats.num_unknown_rows += 1

    def _new_tokens(
        self, sequence: Sequence, position: int, chain_before: int, token_ids: list[int], finish: int
    ) -> list[int] | None:
        """Those of a row's tokens that extend the sequence; None: the row is not to be taken."""
        known = len(sequence.token_ids) - position
        if sequence.end is not None:
            self._stats.num_ended_rows += 1
        elif known < 0:
            self._stats.num_gap_rows += 1
        elif known > len(token_ids) or (known == len(token_ids) and not finish):
            self._stats.num_duplicate_rows += 1
        elif chain.extend(chain_before, token_ids[:known]) != sequence.chain:
            self._stats.num_spliced_rows += 1
        else:
            return token_ids[known:]
        return None

    def _extend(self, effects: Effects, request: _Live, sequence: Sequence, arrival: Arrival) -> None:
        request_id = request.opened.request_id
        token_offset, text_offset, chain_before = len(sequence.token_ids), sequence.num_chars, sequence.chain
        text = sequence.extend(arrival)
        new_ids = sequence.token_ids[token_offset:].tolist()
        self._stats.num_tokens += len(new_ids)
        rows: TextRows | None = None
        end = sequence.end
        if end is not None:
            if arrival.finish is _GOES_ON:
                effects.cancels.append(Cancellation(request_id, sequence.index))
            request.num_ended += 1
            if request.num_ended == request.opened.n:
                rows = TextRows()
                retirement = self._retire(request, rows)
                end = replace(end, usage=retirement.result.usage)
                effects.retirements.append(retirement)
        if rows is None:
            rows = effects.rows_for(request.route)
        rows.add(
            request_id,
            sequence.index,
            token_offset=token_offset,
            text_offset=text_offset,
            chain=chain_before,
            token_ids=new_ids,
            text=text,
            end=end,
            logprobs=sequence.logprobs,
        )

    def _retire(self, request: _Live, rows: TextRows) -> Retirement:
        opened = request.opened
        del self._live[opened.request_id]
        self._ended[opened.request_id] = None
        if len(self._ended) > _ENDED_REMEMBERED:
            self._ended.popitem(last=False)
        usage = Usage(
            num_prompt_tokens=opened.num_prompt_tokens,
            num_output_tokens=sum(len(sequence.token_ids) for sequence in request.sequences),
            num_cached_tokens=request.num_cached_tokens,
        )
        result = FinishedRequest(
            opened.header, tuple(sequence.finished(usage) for sequence in request.sequences), usage
        )
        return Retirement(opened.request_id, request.route, result, rows)


def _chains_after(rows: TokenRows) -> list[int]:
    """u64 per row of exactly one token: the chain behind it; any value for the other rows, nobody reads it."""
    if not len(rows.token_ids):
        return [0] * len(rows)
    firsts = np.minimum(np.cumsum(rows.counts) - rows.counts, len(rows.token_ids) - 1)
    after: list[int] = chain.extend_columns(rows.chains, rows.token_ids[firsts]).tolist()
    return after
