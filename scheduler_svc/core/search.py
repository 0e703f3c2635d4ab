"""The search of a request with beams while it goes on: what its beams have found, and the place of its log."""

import numpy as np

from contract.domain import chain
from contract.domain.finish import FinishReason
from contract.domain.plan import NO_TOKENS, U32
from contract.domain.rows import TokenRows
from contract.domain.timeline import Start
from scheduler_svc.core.beams import (
    BeamRules,
    Candidate,
    Found,
    Hypothesis,
    advance,
    choose,
    concluded,
    outcome,
    pack,
    replay,
)


class Search:
    """The beams of one request. All that chooses is a function of the words in its log and of what its beams find."""

    def __init__(self, rules: BeamRules, words: U32 = NO_TOKENS) -> None:
        """`words`: those of the choices that the log has.

        Raises:
            ValueError: they are no choices by these rules.
        """
        self.rules = rules
        self.beams = replay(rules, words)
        self.found: dict[int, Found] = {}  # by beam, of the step that goes on
        self.num_cached_tokens = 0  # of the prompt, as its first slot found them
        self._num_words = len(words)
        self._chain = chain.extend(chain.CHAIN_START, words.tolist())
        self._start: Start | None = None  # not told yet

    @property
    def width(self) -> int:
        """Beams that go on."""
        return len(self.beams.running)

    def choose(self) -> list[Candidate]:
        """The choice of a step in which every beam has found its next tokens."""
        return choose(self.rules, self.beams, [self.found[index] for index in range(self.width)])

    def advance(self, chosen: list[Candidate]) -> tuple[int, ...]:
        """Go on with a choice; the parents of the beams that go on, in their order."""
        stop_token_ids = self.rules.stop_token_ids
        self.beams, self.found = advance(self.rules, self.beams, chosen), {}
        return tuple(each.parent for each in chosen if each.token_id not in stop_token_ids)

    def outcome(self, max_tokens: int) -> tuple[Hypothesis, ...] | None:
        """The outputs, best first, if the search has ended; beams end at `max_tokens`."""
        return outcome(self.rules, self.beams, max_tokens)

    def concluded(self) -> tuple[Hypothesis, ...]:
        """The outputs if the beams end as they are."""
        return concluded(self.rules, self.beams)

    def finish_of(self, hypothesis: Hypothesis) -> FinishReason:
        """The end of an output."""
        is_stop = hypothesis.token_ids[-1] in self.rules.stop_token_ids
        return FinishReason.STOP if is_stop else FinishReason.LENGTH

    @property
    def has_all(self) -> bool:
        """Return whether all beams that go on have found their next tokens."""
        return len(self.found) == self.width

    def note_start(self, start: Start | None, num_cached_tokens: int) -> None:
        """A beam may have got a slot, the first since the log told of one counts, with so much of the prompt there."""
        self._start = self._start or start
        self.num_cached_tokens = max(self.num_cached_tokens, num_cached_tokens)

    def take_start(self) -> Start | None:
        """The start that is not told yet."""
        start, self._start = self._start, None
        return start

    def rows(self, request_id: bytes, sequence: int, chosen: list[Candidate], model_digest: bytes) -> TokenRows:
        """The row of the log that tells a choice; `sequence` stands for the search."""
        words, start = pack(chosen), self.take_start()
        position, before = self._num_words, self._chain
        self._num_words += len(words)
        self._chain = chain.extend(before, words.tolist())
        return TokenRows(
            request_ids=[request_id],
            sequences=np.array([sequence], np.uint32),
            positions=np.array([position], np.uint32),
            chains=np.array([before], np.uint64),
            counts=np.array([len(words)], np.uint32),
            token_ids=words,
            finishes=np.zeros(1, np.uint8),
            cached_tokens=np.array([0 if position else self.num_cached_tokens], np.uint32),
            model_digest=model_digest,
            starts={} if start is None else {0: start},
        )
