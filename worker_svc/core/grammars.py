"""Outputs that follow a grammar: a matcher for each sequence that has one, and the tokens that may come next."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.plan import U32, Admission
from worker_svc.core.slots import I64

WORD_BITS = 32
_MOST_REASON = 300  # characters
_VERSION = f"llguidance {version('llguidance')}"


@dataclass(frozen=True, slots=True)
class Masks:
    """The tokens that may come in some rows of a batch."""

    rows: I64  # i64[m], each once
    words: npt.NDArray[np.int32]  # i32[m, ceil(vocab_size / 32)]: token t is bit t % 32 of word t // 32


class Follower:
    """One sequence's place in its grammar: a function of the grammar and of the output so far."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: tuple[int, ...]) -> None:
        self.matcher = matcher
        self.eos_token_ids = eos_token_ids
        self._has_ended = False

    def follow(self, token_ids: Iterable[int]) -> None:
        """Go on by tokens that were sampled. What comes after an end is nobody's: its sequence is about to leave."""
        for token_id in token_ids:
            self._has_ended = self._has_ended or token_id in self.eos_token_ids
            if not self._has_ended:
                self.matcher.consume_token(token_id)

    def failure(self) -> str:
        """The reason why the output cannot go on; empty: it can."""
        if not self.matcher.is_error():
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
        """A sequence enters its slot; return whether it has a grammar.

        Raises:
            PenstockError: INTERNAL: this worker has no tokenizer.
        """
        self._followers.pop(admission.slot, None)
        if not (grammar := admission.sampling.grammar):
            return False
        if self._tokens is None:
            raise PenstockError(ErrorCode.INTERNAL, "a sequence has a grammar, and this worker has no tokenizer")
        follower = Follower(LLMatcher(self._tokens(), grammar, log_level=0), admission.eos_token_ids)
        follower.follow(admission.token_ids[admission.num_prompt_tokens :].tolist())
        self._followers[admission.slot] = follower
        return True

    def of(self, slots: I64) -> list[tuple[int, Follower]]:
        """Those of `slots` that have one, by their rows."""
        if not self._followers:
            return []
        found = ((row, self._followers.get(slot)) for row, slot in enumerate(slots.tolist()))
        return [(row, follower) for row, follower in found if follower is not None]

    def masks(self, followers: Iterable[tuple[int, Follower]]) -> Masks:
        """The tokens that may come next, by row."""
        assert self._tokens is not None
        tokens, followers = self._tokens(), list(followers)
        words = np.zeros((len(followers), -(-tokens.vocab_size // WORD_BITS)), np.int32)
        if self._executor is None:
            self._executor = LLExecutor()
        fill_next_token_bitmask_par(
            self._executor, [(follower.matcher, index) for index, (_, follower) in enumerate(followers)], words
        )
        for allowed, (_, follower) in zip(words.view(np.uint32), followers, strict=True):
            may_end = bool(allowed[tokens.eos_token // WORD_BITS] >> np.uint32(tokens.eos_token % WORD_BITS) & 1)
            for token_id in follower.eos_token_ids:
                bit = np.uint32(1 << token_id % WORD_BITS)
                allowed[token_id // WORD_BITS] &= ~bit
                if may_end or follower.matcher.is_error():  # some token must come, and is thrown away
                    allowed[token_id // WORD_BITS] |= bit
        return Masks(
            np.array([row for row, _ in followers], np.int64),
            np.ascontiguousarray(words[:, : -(-self._vocab_size // WORD_BITS)]),
        )


def allowed_ids(words: npt.NDArray[np.int32], vocab_size: int) -> I64:
    """The tokens that one row of `Masks.words` allows, ascending."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size])
