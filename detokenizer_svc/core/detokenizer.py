"""Token rows become text rows: accepted by position and hash, decided from the log alone."""

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from tokenizers import Tokenizer

from contract.domain import chain
from contract.domain.finish import CancelReason, FinishReason, RequestError, Usage
from contract.domain.request import Header
from contract.domain.rows import TextRow, TokenRows
from contract.domain.timeline import Computed, Run, Timeline
from detokenizer_svc.core.batch import LogBatch, RowSelection
from detokenizer_svc.core.checkpoint import logged_rows
from detokenizer_svc.core.choice import choose_decoder
from detokenizer_svc.core.decoder import TextDecoder
from detokenizer_svc.core.logprobs import RowLogprobs
from detokenizer_svc.core.request import FinishedRequest, OpenRequest
from detokenizer_svc.core.sequence import Arrival, Offset, Sequence
from detokenizer_svc.core.spans import Trace
from detokenizer_svc.core.textrows import NewRow, SequenceEnd, TextRows, text_rows

_ENDED_REMEMBERED = 65_536
_UNKNOWN = Computed()
_NOBODY = OpenRequest(Header(b"", "", 0, 0, 0, "", 0), 1, 0)


@dataclass(frozen=True, slots=True)
class Cancellation:
    """A sequence whose end is decided here, so that its scheduler need not go on with it."""

    request_id: bytes
    sequence: int
    reason: CancelReason = CancelReason.STOP


@dataclass(frozen=True)
class Retirement:
    """A request that has ended. Its end is among the texts; its result can be made when they are on their way."""

    request_id: bytes
    route: bytes  # who got the end
    request: "_Live"

    @cached_property
    def result(self) -> FinishedRequest:
        """The result that is kept of the request."""
        return self.request.result()

    @property
    def trace(self) -> Trace:
        """Its trace, for a collector."""
        return self.result.trace(self.request.opened.asked)


@dataclass(slots=True)
class Effects:
    """All that is to be done after a change, in this order: texts, cancels, retirements, results."""

    texts: dict[bytes, TextRows] = field(default_factory=dict)  # by route
    retirements: list[Retirement] = field(default_factory=list)
    cancels: list[Cancellation] = field(default_factory=list)
    results: list[tuple[bytes, bytes]] = field(default_factory=list)  # routes whose text is the result of that request
    gaps: list[bytes] = field(default_factory=list)  # requests of which rows are missing before one that came

    def add(self, after: "Effects") -> None:
        """Take over effects that come after these."""
        for route, rows in after.texts.items():
            before = self.texts.get(route)
            self.texts[route] = rows if before is None else before.joined(rows)
        self.retirements += after.retirements
        self.cancels += after.cancels
        self.results += after.results
        self.gaps += after.gaps

    def rows(self) -> Iterator[TextRow]:
        """All text rows, whatever their route."""
        for rows in self.texts.values():
            yield from rows.rows()


@dataclass(slots=True)
class DetokenizerStats:
    """Counts since the start."""

    num_tokens: int = 0  # added to sequences
    num_duplicate_rows: int = 0  # brought nothing new
    num_gap_rows: int = 0  # began after what is known
    num_mismatched_rows: int = 0  # of another history
    num_ended_rows: int = 0  # after a sequence's end
    num_unknown_rows: int = 0  # of a request that was never opened here


@dataclass(slots=True)
class _Live:
    """A request that goes on."""

    opened: OpenRequest
    sequences: list[Sequence]
    num_ended: int = 0
    num_cached_tokens: int = 0
    model_digest: bytes = b""  # of the model that computes it; empty: it has no tokens
    timeline: Timeline = field(default_factory=Timeline)

    def set_route(self, route: bytes) -> None:
        """Set the gateway that gets the text from now on."""
        for sequence in self.sequences:
            sequence.route = route

    def usage(self) -> Usage:
        """Once all sequences have ended."""
        return Usage(
            num_prompt_tokens=self.opened.num_prompt_tokens,
            num_output_tokens=sum(len(sequence.token_ids) for sequence in self.sequences),
            num_cached_tokens=self.num_cached_tokens,
        )

    def result(self) -> FinishedRequest:
        """The result that is kept once all sequences have ended."""
        usage = self.usage()
        sequences = tuple(sequence.finished(usage) for sequence in self.sequences)
        return FinishedRequest(self.opened.header, sequences, usage, self.model_digest, self.timeline)


class Detokenizer:
    """The live requests of one process; not safe for several threads.

    Feed it `open` and `push` in the order of the log. The same log gives the same texts, ends and results, however its
    rows are cut, doubled or grouped into pushes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        decoders = {skip: choose_decoder(tokenizer, skip_special_tokens=skip) for skip in (True, False)}
        self._set_up(decoders, {}, DetokenizerStats())

    def _set_up(
        self, decoders: dict[bool, TextDecoder], token_bytes: dict[int, bytes], stats: DetokenizerStats
    ) -> None:
        self._decoders = decoders
        self._token_bytes = token_bytes
        self._stats = stats
        self._live: dict[bytes, _Live] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._routes: dict[bytes, bytes] = {}
        self._stray = Sequence(_NOBODY, 0, decoders[True])
        self._stray.chain = -1  # no hash: nothing extends it
        self._last_request_ids: list[bytes] = []
        self._last_indices: list[int] = []
        self._last_sequences: list[Sequence] = []

    @property
    def stats(self) -> DetokenizerStats:
        """Counts since the start, of this one and its siblings."""
        return self._stats

    def sibling(self) -> "Detokenizer":
        """Another one without requests, for another shard, that shares what was learnt about the tokenizer."""
        other = object.__new__(Detokenizer)
        other._set_up(self._decoders, self._token_bytes, self._stats)
        return other

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: bytes) -> bool:
        return request_id in self._live

    def is_known(self, request_id: bytes) -> bool:
        """Return whether a request is live or has ended here."""
        return request_id in self._live or request_id in self._ended

    def live_requests(self) -> Iterator[bytes]:
        """Ids of the requests that go on, in the order in which they were opened."""
        return iter(self._live)

    def routes(self) -> Iterator[tuple[bytes, bytes]]:
        """The live requests, each with who gets its text."""
        for request_id, request in self._live.items():
            yield request_id, request.sequences[0].route

    def open(self, opened: OpenRequest, route: bytes = b"") -> None:
        """A request's first appearance; a second one changes nothing.

        Args:
            opened: the request.
            route: who gets its text rows.
        """
        request_id = opened.request_id
        if self.is_known(request_id):
            return
        decoder = self._decoders[opened.text.skip_special_tokens]
        # One object for one route: the hot loop tells routes apart by identity.
        route = self._routes.setdefault(route, route)
        sequences = [Sequence(opened, i, decoder, route) for i in range(opened.n)]
        self._live[request_id] = _Live(opened, sequences, timeline=opened.begun_timeline())
        self._last_request_ids = []

    def forget(self, request_id: bytes) -> None:
        """A request that someone else ended: what comes of it later is after its end."""
        self._drop(request_id)

    def recall(self, request_id: bytes, timeline: Timeline) -> None:
        """Take what the log had told of a request, which was opened just now, before it was compacted."""
        if (request := self._live.get(request_id)) is not None:
            request.timeline = timeline

    def fail(self, request_id: bytes, error: RequestError) -> Effects:
        """Ends what is left of a live request with an error, as rows of the log would."""
        request = self._live.get(request_id)
        going_on = [sequence for sequence in request.sequences if sequence.end is None] if request else []
        num_rows = len(going_on)
        effects = self.push(
            TokenRows(
                request_ids=[request_id] * num_rows,
                sequences=np.array([sequence.index for sequence in going_on], np.uint32),
                positions=np.array([len(sequence.token_ids) for sequence in going_on], np.uint32),
                chains=np.array([sequence.chain for sequence in going_on], np.uint64),
                counts=np.zeros(num_rows, np.uint32),
                token_ids=np.empty(0, np.uint32),
                finishes=np.full(num_rows, FinishReason.ERROR, np.uint8),
                cached_tokens=np.zeros(num_rows, np.uint32),
                errors=dict.fromkeys(range(num_rows), error),
            )
        )
        effects.cancels += [Cancellation(request_id, sequence.index) for sequence in going_on]
        return effects

    def push(self, rows: TokenRows, computed: Computed = _UNKNOWN, *, gives_texts: bool = True) -> Effects:
        """Takes rows of the log; each that extends its sequence becomes one text row.

        Args:
            rows: the next of the log.
            computed: where and when they were made.
            gives_texts: false if nobody is to get these rows, for instance as whole snapshots will follow; what has
                ended is told nevertheless.
        """
        effects = Effects()
        batch = LogBatch(rows, None if rows.logprobs is None else RowLogprobs(rows.logprobs, self.token_bytes))
        sequences = self._sequences_of(rows)
        if rows.cached_tokens.any():
            self._note_cached(rows)
        if rows.starts:
            self._note_starts(rows, sequences, computed)
        if first_rows := batch.first_rows():
            self._note_model(rows, first_rows)
        token_ids, chains_after = batch.columns()
        selections: dict[bytes, RowSelection] = {}
        selection = RowSelection()
        route: bytes | None = None
        num_plain = 0
        for row, (sequence, chain_before, token_id, chain_after) in enumerate(
            zip(sequences, rows.chains.tolist(), token_ids, chains_after, strict=True)
        ):
            if sequence.route is not route:
                route = sequence.route
                selection = selections.setdefault(route, RowSelection())
            # Behind the same tokens (the hash says so) one more, of which only the text matters: nearly every row.
            if chain_before == sequence.chain and (
                (text := sequence.piece(token_id)) is not None or (text := sequence.step(token_id)) is not None
            ):
                selection.rows.append(row)
                selection.texts.append(text)
                selection.text_offsets.append(sequence.num_chars)
                sequence.num_chars += len(text)
                sequence.token_ids.append(token_id)
                sequence.parts.append(text)
                sequence.chain = chain_after
                num_plain += 1
            else:
                self._take(effects, selection, sequence, batch, row)
        self._stats.num_tokens += num_plain
        prompts = {row: sequences[row].request.num_prompt_tokens for row in first_rows}
        for route, selection in selections.items():
            if selection.rows and gives_texts:
                effects.texts[route] = selection.text_rows(batch, prompts)
        for retirement in effects.retirements:
            retirement.request.timeline.finished_ns = computed.sent_ns
        return effects

    def attach(self, request_id: bytes, route: bytes, offsets: SequenceOf[Offset] = ()) -> Effects:
        """Sends a live request's text to `route` from now on, beginning with what lies after the offsets.

        Args:
            request_id: of a request that may have ended: then its result has the text.
            route: who gets its text rows.
            offsets: what the client has of each sequence; missing ones are none of it.
        """
        effects = Effects()
        request = self._live.get(request_id)
        if request is not None:
            request.set_route(self._routes.setdefault(route, route))
            if len(rows := self.snapshot(request_id, offsets)):
                effects.texts[route] = rows
        elif request_id in self._ended:
            effects.results.append((route, request_id))
        return effects

    def snapshot(self, request_id: bytes, offsets: SequenceOf[Offset] = ()) -> TextRows:
        """The text that a live request has after the given offsets, one row for each sequence that has anything."""
        request = self._live.get(request_id)
        rows = [
            sequence.rest(offsets[sequence.index] if sequence.index < len(offsets) else Offset())
            for sequence in (request.sequences if request is not None else ())
        ]
        digest = request.model_digest if request is not None else b""
        return text_rows([row for row in rows if row is not None], digest)

    def snapshots(self) -> Iterator[tuple[bytes, TextRows]]:
        """All of every live request, with who gets its text."""
        for request_id, request in self._live.items():
            yield request.sequences[0].route, self.snapshot(request_id)

    def checkpoint(self, request_id: bytes) -> TokenRows:
        """All rows that were taken of a live request, from its first token on: pushed to another `Detokenizer` that has
        opened it, they lead to where this one is."""
        request = self._live[request_id]
        return logged_rows(request.sequences, request.num_cached_tokens, request.model_digest, request.timeline)

    def num_sequences(self, request_id: bytes) -> int:
        """Samples of a live request."""
        return self._live[request_id].opened.n

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token alone stands for, special tokens included; may be a part of a character."""
        data = self._token_bytes.get(token_id)
        if data is None:
            data = self._token_bytes[token_id] = self._decoders[False].token_bytes(token_id)
        return data

    def _sequences_of(self, rows: TokenRows) -> list[Sequence]:
        """The sequence of each row. Decoding steps have the same rows one after the other: then they are known."""
        indices = rows.sequences.tolist()
        if rows.request_ids == self._last_request_ids and indices == self._last_indices:
            return self._last_sequences
        live = self._live
        self._last_request_ids, self._last_indices = rows.request_ids, indices
        self._last_sequences = [
            request.sequences[index]
            if (request := live.get(request_id)) is not None and index < request.opened.n
            else self._stray
            for request_id, index in zip(rows.request_ids, indices, strict=True)
        ]
        return self._last_sequences

    def _note_model(self, rows: TokenRows, first_rows: list[int]) -> None:
        """Takes over from first rows which model computes their requests: all samples of one are computed by one."""
        for row in first_rows:
            request = self._live.get(rows.request_ids[row])
            if request is not None and not request.model_digest:
                request.model_digest = rows.model_digest

    def _note_starts(self, rows: TokenRows, sequences: SequenceOf[Sequence], computed: Computed) -> None:
        """Takes over from sequences' first rows in a slot since when they have it, before the rows are taken."""
        for row, start in rows.starts.items():
            sequence, request = sequences[row], self._live.get(rows.request_ids[row])
            position = int(rows.positions[row])
            if request is not None and position >= len(sequence.token_ids):  # else it came before, or is stray
                request.timeline.add(Run(sequence.index, position, start, computed))

    def _note_cached(self, rows: TokenRows) -> None:
        """Takes over from first rows how much of the prompt was found in the prefix cache."""
        for row in np.flatnonzero(rows.cached_tokens).tolist():
            request = self._live.get(rows.request_ids[row])
            if request is not None and not rows.positions[row]:
                request.num_cached_tokens = max(request.num_cached_tokens, int(rows.cached_tokens[row]))

    def _take(self, effects: Effects, selection: RowSelection, sequence: Sequence, batch: LogBatch, row: int) -> None:
        """Takes a row that is more than one plain token, if it extends its sequence."""
        if sequence is self._stray:
            self._count_stray(batch.rows.request_ids[row])
            return
        finish = FinishReason(batch.finishes[row])
        all_tokens = batch.tokens(row)
        if finish is FinishReason.LENGTH and len(all_tokens) == 1 and int(batch.rows.chains[row]) == sequence.chain:
            text = sequence.piece(all_tokens[0])
            if text is not None:  # many at once: nothing is held back, nothing is looked for
                end = self._end(effects, sequence, sequence.end_by_count(all_tokens[0], text))
                self._stats.num_tokens += 1
                selection.end(row, text, sequence.num_chars - len(text), end)
                return
        tokens = self._new_tokens(sequence, batch, row, all_tokens, finish)
        if tokens is None:
            if sequence.end is None and int(batch.rows.positions[row]) > len(sequence.token_ids):
                effects.gaps.append(sequence.request.request_id)
            return
        token_offset, text_offset, chain_before = len(sequence.token_ids), sequence.num_chars, sequence.chain
        first_token = batch.starts[row + 1] - len(tokens)
        text = sequence.extend(Arrival(tokens, finish, batch.rows.errors.get(row), batch.logprobs, first_token))
        new_ids = sequence.token_ids[token_offset:].tolist()
        self._stats.num_tokens += len(new_ids)
        new = NewRow(
            request_id=sequence.request.request_id,
            sequence=sequence.index,
            token_offset=token_offset,
            text_offset=text_offset,
            chain=chain_before,
            token_ids=new_ids,
            text=text,
            end=sequence.end,
            logprobs=sequence.logprobs,
            num_prompt_tokens=sequence.request.num_prompt_tokens,
        )
        if not finish and sequence.end is not None:
            effects.cancels.append(Cancellation(new.request_id, new.sequence))
        if sequence.end is not None:
            new.end = self._end(effects, sequence, sequence.end)
        selection.add(row, new, whole=len(new_ids) == len(all_tokens))

    def _new_tokens(
        self, sequence: Sequence, batch: LogBatch, row: int, token_ids: list[int], finish: FinishReason
    ) -> list[int] | None:
        """Those of a row's tokens that extend the sequence; None: the row is not to be taken."""
        known = len(sequence.token_ids) - int(batch.rows.positions[row])
        if sequence.end is not None:
            self._stats.num_ended_rows += 1
        elif known < 0:
            self._stats.num_gap_rows += 1
        elif known > len(token_ids) or (known == len(token_ids) and not finish):
            self._stats.num_duplicate_rows += 1
        elif chain.extend(int(batch.rows.chains[row]), token_ids[:known]) != sequence.chain:
            self._stats.num_mismatched_rows += 1
        else:
            return token_ids[known:]
        return None

    def _end(self, effects: Effects, sequence: Sequence, end: SequenceEnd) -> SequenceEnd:
        """Counts a sequence's end; with that of the last sequence the request has ended, and what it used is told."""
        request_id = sequence.request.request_id
        request = self._live[request_id]
        request.num_ended += 1
        if request.num_ended < request.opened.n:
            return end
        self._drop(request_id)
        effects.retirements.append(Retirement(request_id, sequence.route, request))
        return SequenceEnd(end.reason, end.stop_reason, end.error, request.usage())

    def _count_stray(self, request_id: bytes) -> None:
        if request_id in self._ended:
            self._stats.num_ended_rows += 1
        else:
            self._stats.num_unknown_rows += 1

    def _drop(self, request_id: bytes) -> None:
        self._live.pop(request_id, None)
        self._last_request_ids = []
        self._ended[request_id] = None
        if len(self._ended) > _ENDED_REMEMBERED:
            self._ended.popitem(last=False)
