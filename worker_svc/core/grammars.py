"""Outputs that follow a grammar or have a bound on their thoughts, and the tokens that may come next in them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.plan import U32, Admission
from worker_svc.core.slots import I64
from worker_svc.core.thought import Thought

WORD_BITS = 32
_ANY = -1  # a word that allows its tokens
_MOST_REASON = 300  # characters
_VERSION = f"llguidance {version('llguidance')}"

Words: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Masks:
    """The tokens that may come in some rows of a batch."""

    rows: I64  # i64[m], each once
    words: Words  # i32[m, at least ceil(vocab_size / 32)]: token t is bit t % 32 of word t // 32


class Follower:
    """One sequence's place in its grammar and its thought: a function of these and of the output so far."""

    def __init__(self, matcher: LLMatcher | None, eos_token_ids: tuple[int, ...], thought: Thought | None) -> None:
        """`matcher`: None: it has no grammar; `thought`: None: nothing bounds it."""
        self.matcher = matcher
        self.thought = thought
        self.eos_token_ids = eos_token_ids
        self._has_ended = False

    def takes(self, token_id: int) -> bool:
        """Return whether the matcher is to see a token that was sampled. What comes after an end is nobody's: its
        sequence is about to leave.
        """
        self._has_ended = self._has_ended or token_id in self.eos_token_ids
        return not self._has_ended

    def failure(self) -> str:
        """The reason why the output cannot go on; empty: it can."""
        if self.matcher is None or not self.matcher.is_error():
            return ""
        reason = self.matcher.get_error().partition("<state>")[0].strip()[:_MOST_REASON]
        return f"the output cannot follow its grammar any further: {reason} ({_VERSION})"


class SlotGrammars:
    """Indexed by slot."""

    def __init__(self, tokens: Callable[[], LLTokenizer] | None, vocab_size: int) -> None:
        """`tokens`: those of the model, made when they are called for; None: no sequence may have a grammar."""
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._followers: dict[int, Follower] = {}
        self._executor: LLExecutor | None = None

    def __bool__(self) -> bool:
        """Return whether some sequence has a grammar."""
        return bool(self._followers)

    def clear(self) -> None:
        """Empty every slot."""
        self._followers.clear()

    def release(self, slots: U32) -> None:
        """Empty `slots`."""
        for slot in slots.tolist() if self._followers else ():
            self._followers.pop(slot, None)

    def remember(self, admission: Admission) -> bool:
        """A sequence enters its slot; return whether it has a grammar or a bound.

        Raises:
            PenstockError: INTERNAL: this worker has no tokenizer.
        """
        self._followers.pop(admission.slot, None)
        thought, matcher = Thought.of(admission), self._matcher(admission.sampling.grammar)
        if thought is None and matcher is None:
            return False
        follower = self._followers[admission.slot] = Follower(matcher, admission.eos_token_ids, thought)
        if matcher is not None:
            output = admission.token_ids[admission.num_prompt_tokens :].tolist()
            matcher.consume_tokens([token_id for token_id in output if follower.takes(token_id)])
        return True

    def _matcher(self, grammar: str) -> LLMatcher | None:
        if not grammar:
            return None
        if self._tokens is None:
            raise PenstockError(ErrorCode.INTERNAL, "a sequence has a grammar, and this worker has no tokenizer")
        return LLMatcher(self._tokens(), grammar, log_level=0)

    def of(self, slots: I64) -> list[tuple[int, Follower]]:
        """Those of `slots` that have one, by their rows."""
        if not self._followers:
            return []
        found = ((row, self._followers.get(slot)) for row, slot in enumerate(slots.tolist()))
        return [(row, follower) for row, follower in found if follower is not None]

    @property
    def num_words(self) -> int:
        """Words of a mask."""
        return -(-(self._vocab_size if self._tokens is None else self._tokens().vocab_size) // WORD_BITS)

    def follow(self, sampled: Iterable[tuple[Follower, int]]) -> None:
        """Sequences go on by a token each."""
        seen = []
        for follower, token_id in sampled:
            if follower.thought is not None:
                follower.thought.add((token_id,))
            if follower.matcher is not None and follower.takes(token_id):
                seen.append((follower.matcher, token_id))
        if seen:
            self._threads().consume_token_par(seen)

    def masks(self, followers: Sequence[tuple[int, Follower]], words: Words | None = None) -> Masks:
        """The tokens that may come next, by row; written to `words` [len(followers), num_words] if given."""
        if words is None:
            words = np.empty((len(followers), self.num_words), np.int32)
        self._fill([follower for _, follower in followers], words)
        for allowed, (_, follower) in zip(words.view(np.uint32), followers, strict=True):
            if follower.thought is not None and follower.thought.must_close:
                _keep_alone(allowed, follower.thought.closing_token_id)
        return Masks(np.array([row for row, _ in followers], np.int64), words)

    def _fill(self, followers: Sequence[Follower], words: Words) -> None:
        """The tokens that go on with the grammars; any where there is none."""
        matchers = [(each.matcher, index) for index, each in enumerate(followers) if each.matcher is not None]
        if len(matchers) < len(followers):
            words.fill(_ANY)
        if matchers:
            fill_next_token_bitmask_par(self._threads(), matchers, words)
            self._allow_ends({index: followers[index] for _, index in matchers}, words.view(np.uint32))

    def _allow_ends(self, followers: dict[int, Follower], allowed: npt.NDArray[np.uint32]) -> None:
        """Allow the end tokens of each sequence where its grammar may end, and nowhere else; by row."""
        assert self._tokens is not None
        may_end = _has_bit(allowed, self._tokens().eos_token)
        rows_by_ends: dict[tuple[int, ...], list[int]] = {}
        for row, follower in followers.items():
            # Some token must come where a grammar cannot go on, and is thrown away.
            may_end[row] |= bool(follower.failure())
            rows_by_ends.setdefault(follower.eos_token_ids, []).append(row)
        for token_ids, rows in rows_by_ends.items():
            for token_id in token_ids:
                bit = np.uint32(1 << token_id % WORD_BITS)
                others = allowed[rows, token_id // WORD_BITS] & ~bit
                allowed[rows, token_id // WORD_BITS] = np.where(may_end[rows], others | bit, others)

    def _threads(self) -> LLExecutor:
        if self._executor is None:
            self._executor = LLExecutor()
        return self._executor


def _keep_alone(allowed: npt.NDArray[np.uint32], token_id: int) -> None:
    """Leave one token of those that a row allows, if it is among them."""
    kept = allowed[token_id // WORD_BITS] & np.uint32(1 << token_id % WORD_BITS)
    if kept:
        allowed.fill(0)
        allowed[token_id // WORD_BITS] = kept


def _has_bit(words: npt.NDArray[np.uint32], token_id: int) -> npt.NDArray[np.bool_]:
    return (words[:, token_id // WORD_BITS] >> np.uint32(token_id % WORD_BITS) & np.uint32(1)).astype(np.bool_)


def allowed_ids(words: Words, vocab_size: int) -> I64:
    """The tokens that one row of `Masks.words` allows, ascending."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size])
