"""The requests that go on, and the ids of those that have ended."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from contract.domain.finish import FinishReason, RequestError, Usage
from contract.domain.plan import NO_TOKENS
from contract.domain.request import Header
from contract.domain.rows import TokenRows
from contract.domain.timeline import Computed, Run, Timeline
from contract.texts.decoder import TextDecoder
from detokenizer_svc.core.checkpoint import logged_rows
from detokenizer_svc.core.request import FinishedRequest, OpenRequest
from detokenizer_svc.core.search import SearchLog
from detokenizer_svc.core.sequence import Offset, Sequence
from detokenizer_svc.core.textrows import TextRows, text_rows

_ENDED_REMEMBERED = 65_536
_NOBODY = OpenRequest(Header(b"", "", 0, 0, 0, "", 0), 1, 0)


@dataclass(slots=True)
class LiveRequest:
    """A request that goes on."""

    opened: OpenRequest
    sequences: list[Sequence]
    search: SearchLog | None = None  # of its beams
    num_ended: int = 0
    num_cached_tokens: int = 0
    model_digest: bytes = b""  # of the model that computes it; empty: it has no tokens
    timeline: Timeline = field(default_factory=Timeline)

    def logged_as(self, index: int) -> Sequence | None:
        """The sequence of rows with this index: a sample, or the search after the last of them; None: there is none."""
        if index < self.opened.n:
            return self.sequences[index]
        return self.search if index == self.opened.n else None

    @property
    def route(self) -> bytes:
        """The gateway that gets the text."""
        return self.sequences[0].route

    def set_route(self, route: bytes) -> None:
        """Set the gateway that gets the text from now on."""
        for sequence in self.sequences:
            sequence.route = route

    def rest(self, offsets: SequenceOf[Offset] = ()) -> TextRows:
        """The text after the given offsets, one row for each sequence that has any; where one is missing, all text."""
        rows = [
            sequence.rest(offsets[sequence.index] if sequence.index < len(offsets) else Offset())
            for sequence in self.sequences
        ]
        return text_rows([row for row in rows if row is not None], self.model_digest)

    def logged(self) -> TokenRows:
        """All that was taken of it from the log, as few rows."""
        searches = [] if self.search is None else [self.search]
        return logged_rows([*self.sequences, *searches], self.num_cached_tokens, self.model_digest, self.timeline)

    def going_on(self) -> list[Sequence]:
        """The sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.end is None]

    def usage(self) -> Usage:
        """The tokens that it used, once all sequences have ended."""
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


class LiveRequests(Mapping[bytes, LiveRequest]):
    """By id, in the order in which they were opened."""

    def __init__(self, decoder: TextDecoder) -> None:
        """There is none yet; `decoder` is for `stray`, any will do."""
        self._live: dict[bytes, LiveRequest] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._routes: dict[bytes, bytes] = {}
        self.stray = Sequence(_NOBODY, 0, decoder)  # that of rows which belong to none of them
        self.stray.chain = -1  # no hash: nothing extends it
        self._last_request_ids: list[bytes] = []
        self._last_indices: list[int] = []
        self._last_sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._live)

    def __getitem__(self, request_id: bytes) -> LiveRequest:
        return self._live[request_id]

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._live

    def has_ended(self, request_id: bytes) -> bool:
        """Return whether a request has ended here, as far as that is remembered."""
        return request_id in self._ended

    def open(self, opened: OpenRequest, decoder: TextDecoder, route: bytes) -> None:
        """Begin a request whose id is new."""
        route = self.route(route)
        sequences = [Sequence(opened, index, decoder, route) for index in range(opened.n)]
        search = SearchLog(opened, decoder) if opened.has_search else None
        self._live[opened.request_id] = LiveRequest(opened, sequences, search, timeline=opened.begun_timeline())
        self._last_request_ids = []

    def end(self, request_id: bytes) -> None:
        """End a request: what comes of it later is after its end."""
        self._live.pop(request_id, None)
        self._last_request_ids = []
        self._ended[request_id] = None
        if len(self._ended) > _ENDED_REMEMBERED:
            self._ended.popitem(last=False)

    def route(self, route: bytes) -> bytes:
        """The one object that stands for a route: the hot loop tells routes apart by identity."""
        return self._routes.setdefault(route, route)

    def sequences_of(self, rows: TokenRows) -> list[Sequence]:
        """The sequence of each row. Decoding steps have the same rows one after the other: then they are known."""
        indices = rows.sequences.tolist()
        if rows.request_ids == self._last_request_ids and indices == self._last_indices:
            return self._last_sequences
        live = self._live
        self._last_request_ids, self._last_indices = rows.request_ids, indices
        self._last_sequences = [
            (request.logged_as(index) if (request := live.get(request_id)) is not None else None) or self.stray
            for request_id, index in zip(rows.request_ids, indices, strict=True)
        ]
        return self._last_sequences

    def note(self, rows: TokenRows, first_rows: list[int], computed: Computed) -> None:
        """Take over what rows tell of their requests beside tokens and ends, before they are taken.

        Args:
            rows: the next of the log.
            first_rows: those that begin their sequences.
            computed: where and when they were made.
        """
        if rows.cached_tokens.any():
            self._note_cached(rows)
        if rows.starts:
            self._note_starts(rows, computed)
        for row in first_rows:  # all samples of a request are computed by one model
            request = self._live.get(rows.request_ids[row])
            if request is not None and not request.model_digest:
                request.model_digest = rows.model_digest

    def _note_cached(self, rows: TokenRows) -> None:
        """Take over from first rows how much of the prompt was found in the prefix cache."""
        for row in np.flatnonzero(rows.cached_tokens).tolist():
            request = self._live.get(rows.request_ids[row])
            if request is not None and not rows.positions[row]:
                request.num_cached_tokens = max(request.num_cached_tokens, int(rows.cached_tokens[row]))

    def _note_starts(self, rows: TokenRows, computed: Computed) -> None:
        """Take over from sequences' first rows in a slot since when they have it."""
        sequences = self.sequences_of(rows)
        for row, start in rows.starts.items():
            sequence, request = sequences[row], self._live.get(rows.request_ids[row])
            position = int(rows.positions[row])
            if request is not None and position >= len(sequence.token_ids):  # else it came before, or is stray
                num_tokens = 0 if sequence is request.search else position  # words are no tokens
                request.timeline.add(Run(sequence.index, num_tokens, start, computed))


def failed_rows(sequences: SequenceOf[Sequence], error: RequestError) -> TokenRows:
    """The rows by which a log would end sequences with an error."""
    num_rows = len(sequences)
    return TokenRows(
        request_ids=[sequence.request.request_id for sequence in sequences],
        sequences=np.array([sequence.index for sequence in sequences], np.uint32),
        positions=np.array([len(sequence.token_ids) for sequence in sequences], np.uint32),
        chains=np.array([sequence.chain for sequence in sequences], np.uint64),
        counts=np.zeros(num_rows, np.uint32),
        token_ids=NO_TOKENS,
        finishes=np.full(num_rows, FinishReason.ERROR, np.uint8),
        cached_tokens=np.zeros(num_rows, np.uint32),
        errors=dict.fromkeys(range(num_rows), error),
    )
