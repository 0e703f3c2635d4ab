"""Results of `LLM` and `LLMEngine`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from contract.domain.finish import FinishReason, RequestError, Usage
from contract.domain.params import SamplingParams
from contract.domain.plan import PromptLogprobs
from contract.domain.pooling import F32
from contract.domain.rows import TextRow, TokenLogprob

FinishText = Literal["stop", "length", "abort", "error", "pooled", "repetition"]

_FINISH_TEXTS: dict[FinishReason, FinishText] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
    FinishReason.POOLED: "pooled",
    FinishReason.REPETITION: "repetition",
}


class Addition(Protocol):
    """The part of one step that a sample got: a `TextRow` of the pipeline, or a `Delta` that a client received."""

    @property
    def text(self) -> str:
        """New text."""
        ...

    @property
    def token_ids(self) -> tuple[int, ...]:
        """New tokens."""
        ...

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """One for each new token, if asked for."""
        ...

    @property
    def finish(self) -> FinishReason:
        """The reason why it ended; UNSPECIFIED while it goes on."""
        ...

    @property
    def stop_reason(self) -> int | str | None:
        """The stop token id or stop string that ended it."""
        ...


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token at one place of an output, as vLLM has it."""

    logprob: float  # natural log of its probability by the raw logits
    rank: int | None = None  # in the whole vocabulary, 1 for the most likely
    decoded_token: str | None = None  # its text alone; a part of a character is U+FFFD


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request, as far as it has come."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    # If the request asked, by id for each token: the sampled one and the most likely, in this order; of beams the
    # chosen one alone, whose rank is not known.
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None  # sum over the sampled tokens, if the request asked for logprobs or beams
    finish_reason: FinishText | None = None  # None while it goes on
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it; None for EOS
    has_chosen_logprobs: bool = False  # of `logprob_token_ids`: beside the sampled token those, whose rank is not known

    @property
    def finished(self) -> bool:
        """Return whether nothing will be added."""
        return self.finish_reason is not None

    def extend(self, row: Addition) -> None:
        """Add what one step brought."""
        self.text += row.text
        self.token_ids.extend(row.token_ids)
        if self.logprobs is not None and self.cumulative_logprob is not None:
            known = [each for each in row.logprobs if not math.isnan(each.logprob)]
            are_ranked = not self.has_chosen_logprobs
            by_token = (_by_token(each, are_ranked=are_ranked) for each in row.logprobs)
            self.logprobs.extend(by_token if row.logprobs else ({} for _ in row.token_ids))
            self.cumulative_logprob += sum(each.logprob for each in known)
        if row.finish is not FinishReason.UNSPECIFIED:
            self.finish_reason = _FINISH_TEXTS[row.finish]
            self.stop_reason = row.stop_reason


def prompt_entries(prompt: PromptLogprobs, token_bytes: Callable[[int], bytes]) -> list[dict[int, Logprob]]:
    """For each token of a prompt but the first its logprob and those of the most likely, by id, as vLLM has them."""
    logprobs = prompt.logprobs
    ends = [0, *np.cumsum(logprobs.top_counts).tolist()]
    top_ids, top_logprobs = logprobs.top_ids.tolist(), logprobs.top_logprobs.tolist()
    own = zip(prompt.token_ids.tolist(), logprobs.sampled.tolist(), logprobs.ranks.tolist(), strict=True)
    entries = []
    for index, (token_id, logprob, rank) in enumerate(own):
        entry = {token_id: Logprob(logprob, rank, _text(token_bytes(token_id)))}
        for place, at in enumerate(range(ends[index], ends[index + 1]), 1):
            entry.setdefault(top_ids[at], Logprob(top_logprobs[at], place, _text(token_bytes(top_ids[at]))))
        entries.append(entry)
    return entries


def _by_token(entry: TokenLogprob, *, are_ranked: bool) -> dict[int, Logprob]:
    if math.isnan(entry.logprob):
        return {}
    told = {entry.token_id: Logprob(entry.logprob, entry.rank or None, _text(entry.token_bytes))}
    top = zip(entry.top, entry.top_bytes, strict=True)
    for rank, ((token_id, logprob), token_bytes) in enumerate(top, 1):
        told.setdefault(token_id, Logprob(logprob, rank if are_ranked else None, _text(token_bytes)))
    return told


def _text(token_bytes: bytes) -> str:
    return token_bytes.decode(errors="replace")


def new_samples(params: SamplingParams) -> list[CompletionOutput]:
    """The samples that a request asks for, without tokens."""
    samples = [CompletionOutput(index) for index in range(params.n)]
    if params.tells_logprobs:
        for sample in samples:
            sample.logprobs, sample.cumulative_logprob = [], 0.0
            sample.has_chosen_logprobs = bool(params.logprob_token_ids)
    return samples


@dataclass(slots=True)
class RequestOutput:
    """One request, as far as it has come.

    `LLMEngine.step` returns the same object each time with more in it, so that a long generation is not copied at
    every step; copy it to keep a state of it.
    """

    request_id: str
    prompt: str | None  # None if it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # one for each of the n samples
    finished: bool = False
    usage: Usage | None = None  # once finished
    error: RequestError | None = None  # why the request failed, if its finish_reason is "error"
    # If the request asked, once the prompt is computed: for each of its tokens, by id, its logprob and those of the
    # most likely there; None for the first.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    vector: F32 | None = None  # f32[dimensions], if its prompt is pooled and computed

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was found in the prefix cache; known once finished."""
        return self.usage.num_cached_tokens if self.usage else 0

    def extend(self, row: TextRow) -> None:
        """Add what one step brought."""
        self.outputs[row.sequence].extend(row)
        self.error = row.error or self.error
        self.usage = row.usage or self.usage
        self.finished = all(output.finished for output in self.outputs)
