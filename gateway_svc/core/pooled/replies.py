"""Replies that are made of vectors."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from contract.domain.finish import Usage
from contract.domain.pooling import F32, cosine
from contract.domain.rows import TextRow
from gateway_svc.core.ask import Form
from gateway_svc.core.prompt_outputs import PromptOutput, PromptVector
from gateway_svc.core.replies import ReplyHead, usage_fields


class _Gathering:
    """Implement `api.PlainReply` but for its body: the vectors of a call's prompts, until all have come."""

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self._context: dict[str, Any] = msgspec.json.decode(head.context)
        self._by_choice: dict[int, PromptVector] = {}

    def learn_prompt(self, choices: Iterable[int], output: PromptOutput) -> None:
        """Implement `api.PlainReply`."""
        if isinstance(output, PromptVector):
            self._by_choice |= dict.fromkeys(choices, output)

    def add(self, choice: int, row: TextRow) -> None:
        """Implement `api.PlainReply`: a row says no more than that its prompt is pooled."""

    @property
    def _vectors(self) -> list[PromptVector]:
        return [self._by_choice[choice] for choice in range(self._head.num_choices)]

    def _scores(self, num_first: int) -> list[float]:
        return cosines([each.values for each in self._vectors], num_first)

    def _list_fields(self, data: list[dict[str, Any]], usages: Sequence[Usage]) -> dict[str, Any]:
        head = self._head
        return {
            "id": head.call_id,
            "object": "list",
            "created": head.created_s,
            "model": head.model,
            "data": data,
            "usage": usage_fields(usages),
        }


class EmbeddingReply(_Gathering):
    """Implement `api.PlainReply`: OpenAI's embeddings, or vLLM's pooling, which has another name for them."""

    def fields(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """Implement `api.PlainReply`."""
        kind, name = ("pooling", "data") if self._head.form is Form.POOLING else ("embedding", "embedding")
        in_base64 = self._context["encoding_format"] == "base64"
        data = [
            {"object": kind, "index": index, name: vector.base64 if in_base64 else vector.numbers}
            for index, vector in enumerate(self._vectors)
        ]
        return self._list_fields(data, usages)


class ScoreReply(_Gathering):
    """Implement `api.PlainReply`: vLLM's scores."""

    def fields(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """Implement `api.PlainReply`."""
        scores = self._scores(self._context["num_first"])
        data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)]
        return self._list_fields(data, usages)


class RerankReply(_Gathering):
    """Implement `api.PlainReply`: documents by likeness, in the shape that Cohere's, Jina's and vLLM's clients read."""

    def fields(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """Implement `api.PlainReply`."""
        scores, documents = self._scores(self._context.get("num_first", 1)), self._context["documents"]
        return {
            "id": self._head.call_id,
            "model": self._head.model,
            "results": [
                {
                    "index": index,
                    "relevance_score": scores[index],
                    **({} if documents is None else {"document": {"text": documents[index]}}),
                }
                for index in ranked(scores, self._context["top_n"])
            ],
            "usage": usage_fields(usages),
        }


def ranked(scores: Sequence[float], top_n: int) -> list[int]:
    """The places of the best scores, best first, of equals the first."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]


def cosines(vectors: Sequence[F32], num_first: int) -> list[float]:
    """The likeness of the first vectors f32[dimensions], or of the only first one, to those after them; without a first
    one each is f32[1], a score.
    """
    if not num_first:
        return [float(vector[0]) for vector in vectors]
    first, second = vectors[:num_first], vectors[num_first:]
    pairs = zip([*first] * (len(second) if num_first == 1 else 1), second, strict=True)
    return [cosine(one, other) for one, other in pairs]
