"""Beam search as a function of what each step chose: the beams that go on, and the best outputs that have ended.

Chosen as by transformers' `generate` with beams, which tests compare it with; sums and scores are of 32 bits as there.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from contract.domain.beams import BeamSearch
from contract.domain.params import Stopping
from contract.domain.plan import F32, U32

_WORDS = 3  # of a candidate in the log
_NEVER = "never"


@dataclass(frozen=True, slots=True)
class BeamRules:
    """All that chooses beams beside the model."""

    width: int
    search: BeamSearch
    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]  # those that end an output

    @classmethod
    def of(cls, width: int, search: BeamSearch, stopping: Stopping, stop_token_ids: Iterable[int]) -> "BeamRules":
        """The rules of a request.

        Raises:
            ValueError: its `max_tokens` is not resolved.
        """
        if stopping.max_tokens is None:
            raise ValueError("a request with beams has max_tokens, which its tokenizer fills in")
        return cls(width, search, stopping.max_tokens, stopping.min_tokens, frozenset(stop_token_ids))

    @property
    def num_candidates(self) -> int:
        """The likeliest tokens of each beam among which are all that a step can choose: tokens with which the beam
        goes on, as many as there are beams, and all that may end it."""
        return self.width + len(self.stop_token_ids)

    def score(self, total: np.float32, num_tokens: int) -> np.float32:
        """The score of an output of so many tokens whose logprobs have this sum."""
        return total / np.float32(num_tokens**self.search.length_penalty)


class Beam(NamedTuple):
    """The beginning of an output, or all of it."""

    token_ids: "array[int]"  # not to be changed
    total: np.float32  # sum of the tokens' logprobs
    logprobs: "array[float]"  # of the tokens, as the steps between sums tell them; not to be changed


class Candidate(NamedTuple):
    """One more token for one of the beams."""

    parent: int  # index of the beam
    token_id: int
    total: np.float32  # sum of the logprobs with this token


class Hypothesis(NamedTuple):
    """An output that has ended."""

    token_ids: "array[int]"
    score: np.float32
    logprobs: "array[float]"  # f32, of the tokens


class Found(NamedTuple):
    """The likeliest next tokens of a beam, likeliest first."""

    token_ids: U32
    logprobs: F32


@dataclass(frozen=True, slots=True)
class Beams:
    """The state of a search after some steps."""

    running: tuple[Beam, ...]  # best first
    finished: tuple[Hypothesis, ...] = ()  # at most as many as there are beams, best first

    @property
    def num_tokens(self) -> int:
        """Tokens of each beam."""
        return len(self.running[0].token_ids)


BEGUN: Final = Beams((Beam(array("I"), np.float32(0), array("f")),))


def choose(rules: BeamRules, beams: Beams, found: Sequence[Found]) -> list[Candidate]:
    """The choice of a step among the next tokens that each beam has: the best, up to the last with which a beam goes
    on. Of equals the first beam's come first."""
    totals = np.concatenate(
        [beam.total + each.logprobs.astype(np.float32) for beam, each in zip(beams.running, found, strict=True)]
    )
    parents = np.repeat(np.arange(len(found)), [len(each.token_ids) for each in found])
    token_ids = np.concatenate([each.token_ids for each in found])
    may_end = beams.num_tokens >= rules.min_tokens
    chosen: list[Candidate] = []
    num_going_on = 0
    for index in np.argsort(-totals, kind="stable").tolist():
        token_id = int(token_ids[index])
        ends = token_id in rules.stop_token_ids
        if ends and not may_end:
            continue
        chosen.append(Candidate(int(parents[index]), token_id, totals[index]))
        num_going_on += not ends
        if num_going_on == rules.width:
            break
    return chosen


def advance(rules: BeamRules, beams: Beams, chosen: Sequence[Candidate]) -> Beams:
    """The state after a step. An output has ended only if it is among the best: candidates after these are there for
    beams to go on with."""
    ended = [each for each in chosen[: rules.width] if each.token_id in rules.stop_token_ids]
    going_on = [each for each in chosen if each.token_id not in rules.stop_token_ids]
    new = [_hypothesis(rules, _extended(beams, each)) for each in ended]
    running = tuple(_extended(beams, each) for each in going_on[: rules.width])
    return Beams(running, _best(rules, (*beams.finished, *new)))


def outcome(rules: BeamRules, beams: Beams, max_tokens: int) -> tuple[Hypothesis, ...] | None:
    """The outputs of a search that has ended, best first; None: it goes on. Beams end at `max_tokens`."""
    if beams.num_tokens >= max_tokens:
        return concluded(rules, beams)
    return beams.finished if _is_done(rules, beams) else None


def concluded(rules: BeamRules, beams: Beams) -> tuple[Hypothesis, ...]:
    """The outputs of a search that cannot go on: its beams end as they are."""
    return _best(rules, (*beams.finished, *(_hypothesis(rules, beam) for beam in beams.running)))


def _is_done(rules: BeamRules, beams: Beams) -> bool:
    early = rules.search.early_stopping
    if len(beams.finished) < rules.width:
        return False
    if early is True or rules.width == 1:  # one beam is greedy search, which ends with its first output
        return True
    # With a positive penalty a negative sum scores best at the greatest length.
    looks_ahead = early == _NEVER and rules.search.length_penalty > 0
    num_tokens = rules.max_tokens if looks_ahead else beams.num_tokens
    return not rules.score(beams.running[0].total, num_tokens) > beams.finished[-1].score


def _extended(beams: Beams, candidate: Candidate) -> Beam:
    """A beam with one more token. Its logprob is what the log tells: the difference of two sums."""
    parent = beams.running[candidate.parent]
    token_ids, logprobs = array("I", parent.token_ids), array("f", parent.logprobs)
    token_ids.append(candidate.token_id)
    logprobs.append(float(candidate.total - parent.total))
    return Beam(token_ids, candidate.total, logprobs)


def _hypothesis(rules: BeamRules, beam: Beam) -> Hypothesis:
    return Hypothesis(beam.token_ids, rules.score(beam.total, len(beam.token_ids)), beam.logprobs)


def _best(rules: BeamRules, hypotheses: Sequence[Hypothesis]) -> tuple[Hypothesis, ...]:
    return tuple(sorted(hypotheses, key=lambda each: -each.score)[: rules.width])


def pack(chosen: Sequence[Candidate]) -> U32:
    """A step's choice as words of the log, three a candidate: parent, token and the bits of the sum."""
    words = np.empty((len(chosen), _WORDS), np.uint32)
    words[:, 0] = [each.parent for each in chosen]
    words[:, 1] = [each.token_id for each in chosen]
    words[:, 2] = np.array([each.total for each in chosen], np.float32).view(np.uint32)
    return words.reshape(-1)


def replay(rules: BeamRules, words: U32) -> Beams:
    """The state after all choices whose words are given.

    Raises:
        ValueError: they are none of these rules.
    """
    candidates = _unpack(words)
    beams, start = BEGUN, 0
    while start < len(candidates):
        end = _end_of_choice(rules, candidates, start)
        chosen = candidates[start:end]
        if any(each.parent >= len(beams.running) for each in chosen):
            raise ValueError("a choice of beams has a parent that is not there")
        beams, start = advance(rules, beams, chosen), end
    return beams


def _unpack(words: U32) -> list[Candidate]:
    if len(words) % _WORDS:
        raise ValueError(f"{len(words)} words of a search, {_WORDS} are a candidate")
    table = words.reshape(-1, _WORDS)
    totals = table[:, 2].copy().view(np.float32)
    parents, token_ids = table[:, 0].tolist(), table[:, 1].tolist()
    return list(map(Candidate, parents, token_ids, totals))


def _end_of_choice(rules: BeamRules, candidates: Sequence[Candidate], start: int) -> int:
    """The end of the choice that begins at `start`: the last candidate with which a beam goes on."""
    num_going_on = 0
    for index in range(start, len(candidates)):
        num_going_on += candidates[index].token_id not in rules.stop_token_ids
        if num_going_on == rules.width:
            return index + 1
    raise ValueError("a choice of beams lacks its last candidates")
