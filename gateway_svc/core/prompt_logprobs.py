"""Logprobs of a prompt as replies tell them: by token as vLLM does, and before those of an echoed output."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from contract.domain.plan import U32, PromptLogprobs
from contract.domain.rows import TokenLogprob
from gateway_svc.core.logprobs import completion_logprobs, finite


@dataclass(frozen=True)
class SpelledPrompt:
    """The logprobs of a prompt, and what its tokens stand for."""

    first: int | None  # the prompt's first token, which has no logprob; None: it is not told
    prompt: PromptLogprobs
    spelled: Mapping[int, bytes]  # every token in it; of one alone, so perhaps a part of a character

    @staticmethod
    def tokens(prompt: PromptLogprobs, first: int | None) -> U32:
        """The tokens that must be spelled, each once."""
        of_first = np.array([] if first is None else [first], np.uint32)
        return np.unique(np.concatenate((of_first, prompt.token_ids, prompt.logprobs.top_ids)).astype(np.uint32))

    @cached_property
    def by_token(self) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: null for the first token; of each other an object by token id."""
        return [None, *({str(token): each for token, each in self._objects(entry)} for entry in self._entries())]

    @cached_property
    def text_offsets(self) -> list[int]:
        """For each token, the first included, the characters that are complete before it."""
        assert self.first is not None
        offsets, data = [0], b""
        num_chars = 0
        for token_id in (self.first, *self.prompt.token_ids[:-1].tolist()):
            data += self.spelled[token_id]
            try:
                num_chars, data = num_chars + len(data.decode()), b""
            except UnicodeDecodeError as error:
                if error.reason != "unexpected end of data":
                    num_chars, data = num_chars + len(data.decode(errors="replace")), b""
            offsets.append(num_chars)
        return offsets[: 1 + len(self.prompt.token_ids)]

    def columns(self, *, as_ids: bool) -> dict[str, list[Any]]:
        """A completion's `logprobs` of the prompt: null for its first token."""
        assert self.first is not None
        first = TokenLogprob(self.first, 0.0, token_bytes=self.spelled[self.first])
        told = completion_logprobs([first, *self._entries()], as_ids=as_ids)
        told["token_logprobs"][0] = told["top_logprobs"][0] = None
        told["text_offset"] = self.text_offsets
        return told

    def _entries(self) -> Iterator[TokenLogprob]:
        logprobs = self.prompt.logprobs
        ends = [0, *np.cumsum(logprobs.top_counts).tolist()]
        top = list(zip(logprobs.top_ids.tolist(), logprobs.top_logprobs.tolist(), strict=True))
        own = zip(self.prompt.token_ids.tolist(), logprobs.sampled.tolist(), logprobs.ranks.tolist(), strict=True)
        for index, (token_id, logprob, rank) in enumerate(own):
            alternatives = tuple(top[ends[index] : ends[index + 1]])
            yield TokenLogprob(
                token_id,
                logprob,
                alternatives,
                self.spelled[token_id],
                tuple(self.spelled[each] for each, _ in alternatives),
                rank=rank,
            )

    @staticmethod
    def _objects(entry: TokenLogprob) -> Iterator[tuple[int, dict[str, Any]]]:
        yield entry.token_id, _object(entry.logprob, entry.rank, entry.token_bytes)
        top = zip(entry.top, entry.top_bytes, strict=True)
        for rank, ((token_id, logprob), token_bytes) in enumerate(top, 1):
            if token_id != entry.token_id:
                yield token_id, _object(logprob, rank, token_bytes)


def _object(logprob: float, rank: int, token_bytes: bytes) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_bytes.decode(errors="replace")}
