"""Token rows become text rows: accepted by position and hash, decided from the log alone."""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from tokenizers import Tokenizer

from contract.domain import chain
from contract.domain.finish import FinishReason, RequestError
from contract.domain.rows import TokenRows
from contract.domain.timeline import Computed, Timeline
from contract.texts.choice import Decoders
from detokenizer_svc.core.batch import LogBatch, RowSelection
from detokenizer_svc.core.effects import Cancellation, Effects, Retirement
from detokenizer_svc.core.live import LiveRequests, failed_rows
from detokenizer_svc.core.logprobs import RowLogprobs
from detokenizer_svc.core.request import OpenRequest
from detokenizer_svc.core.search import SearchLog
from detokenizer_svc.core.sequence import Arrival, Offset, Sequence
from detokenizer_svc.core.stats import DetokenizerStats
from detokenizer_svc.core.textrows import NewRow, SequenceEnd, TextRows, text_rows

_UNKNOWN = Computed()


class Detokenizer:
    """The live requests of one process; not safe for several threads.

    Feed it `open` and `push` in the order of the log. The same log gives the same texts, ends and results, however its
    rows are cut, doubled or grouped into pushes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._set_up(Decoders(tokenizer), DetokenizerStats())

    def _set_up(self, decoders: Decoders, stats: DetokenizerStats) -> None:
        self._decoders = decoders
        self._stats = stats
        self._requests = LiveRequests(decoders.of(skip_special_tokens=True))

    @property
    def stats(self) -> DetokenizerStats:
        """Counts since the start, of this one and its siblings."""
        return self._stats

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token alone stands for; may be a part of a character."""
        return self._decoders.token_bytes(token_id)

    def sibling(self) -> "Detokenizer":
        """Another one without requests, for another shard, that shares what was learnt about the tokenizer."""
        other = object.__new__(Detokenizer)
        other._set_up(self._decoders, self._stats)
        return other

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: bytes) -> bool:
        return request_id in self._requests

    def is_known(self, request_id: bytes) -> bool:
        """Return whether a request is live or has ended here."""
        return request_id in self._requests or self._requests.has_ended(request_id)

    def live_requests(self) -> Iterator[bytes]:
        """Ids of the requests that go on, in the order in which they were opened."""
        return iter(self._requests)

    def routes(self) -> Iterator[tuple[bytes, bytes]]:
        """The live requests, each with who gets its text."""
        for request_id, request in self._requests.items():
            yield request_id, request.route

    def open(self, opened: OpenRequest, route: bytes = b"") -> None:
        """Take in a request at its first appearance; a second one changes nothing.

        Args:
            opened: the request.
            route: who gets its text rows.
        """
        if not self.is_known(opened.request_id):
            options = opened.text
            decoder = self._decoders.of(skip_special_tokens=options.skip_special_tokens, detokenize=options.detokenize)
            self._requests.open(opened, decoder, route)

    def forget(self, request_id: bytes) -> None:
        """Note that someone else has ended a request: what comes of it later is after its end."""
        self._requests.end(request_id)

    def recall(self, request_id: bytes, timeline: Timeline) -> None:
        """Take what the log had told of a request, which was opened just now, before it was compacted."""
        if (request := self._requests.get(request_id)) is not None:
            request.timeline = timeline

    def fail(self, request_id: bytes, error: RequestError) -> Effects:
        """End what is left of a live request with an error, as rows of the log would."""
        if (request := self._requests.get(request_id)) is None:
            return Effects()
        cancels = [Cancellation(request_id, sequence.index) for sequence in request.going_on()]
        effects = self.push(failed_rows(request.going_on(), error))
        effects.cancels += cancels
        return effects

    def push(self, rows: TokenRows, computed: Computed = _UNKNOWN, *, gives_texts: bool = True) -> Effects:
        """Take rows of the log; each that extends its sequence becomes one text row.

        Args:
            rows: the next of the log.
            computed: where and when they were made.
            gives_texts: false if nobody is to get these rows, for instance as whole snapshots will follow; what has
                ended is told nevertheless.
        """
        effects = Effects()
        logprobs = None if rows.logprobs is None else RowLogprobs(rows.logprobs, self._decoders.token_bytes)
        batch = LogBatch(rows, logprobs)
        sequences = self._requests.sequences_of(rows)
        self._requests.note(rows, first_rows := batch.first_rows(), computed)
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
            # After the same tokens (the hash says so) one more, of which only the text matters: nearly every row.
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
        """Send a live request's text to `route` from now on, beginning with what lies after the offsets.

        Args:
            request_id: of a request that may have ended: then its result has the text.
            route: who gets its text rows.
            offsets: what the client has of each sequence; missing ones are none of it.
        """
        effects = Effects()
        if (request := self._requests.get(request_id)) is not None:
            request.set_route(self._requests.route(route))
            if len(rows := request.rest(offsets)):
                effects.texts[route] = rows
        elif self._requests.has_ended(request_id):
            effects.results.append((route, request_id))
        return effects

    def snapshot(self, request_id: bytes, offsets: SequenceOf[Offset] = ()) -> TextRows:
        """The text that a live request has after the given offsets, one row for each sequence that has anything."""
        request = self._requests.get(request_id)
        return text_rows([]) if request is None else request.rest(offsets)

    def snapshots(self) -> Iterator[tuple[bytes, TextRows]]:
        """All of every live request, with who gets its text."""
        for request in self._requests.values():
            yield request.route, request.rest()

    def checkpoint(self, request_id: bytes) -> TokenRows:
        """All rows that were taken of a live request, from its first token on: pushed to another `Detokenizer` that has
        opened it, they lead to where this one is."""
        return self._requests[request_id].logged()

    def num_sequences(self, request_id: bytes) -> int:
        """Samples of a live request."""
        return self._requests[request_id].opened.n

    def _take(self, effects: Effects, selection: RowSelection, sequence: Sequence, batch: LogBatch, row: int) -> None:
        """Take a row that is more than one plain token, if it extends its sequence."""
        if sequence is self._requests.stray:
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
        if isinstance(sequence, SearchLog):
            sequence.take(tokens)
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
        """Count a sequence's end; with that of the last sequence the request has ended, and what it used is told."""
        request_id = sequence.request.request_id
        request = self._requests[request_id]
        request.num_ended += 1
        if request.num_ended < request.opened.n:
            return end
        self._requests.end(request_id)
        effects.retirements.append(Retirement(request_id, sequence.route, request))
        return SequenceEnd(end.reason, end.stop_reason, end.error, request.usage())

    def _count_stray(self, request_id: bytes) -> None:
        if self._requests.has_ended(request_id):
            self._stats.num_ended_rows += 1
        else:
            self._stats.num_unknown_rows += 1
