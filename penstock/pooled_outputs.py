"""Results of prompts that become vectors, as vLLM has them."""

from collections.abc import Sequence
from dataclasses import dataclass

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.pooling import F32, cosine
from penstock.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its dimensions."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt that became a vector, as vLLM has it."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache
    finished: bool = True

    @classmethod
    def of(cls, output: RequestOutput) -> "EmbeddingRequestOutput":
        """The same of a request that was asked for a vector and has ended.

        Raises:
            PenstockError: CANCELLED: it was aborted before that.
        """
        told = EmbeddingOutput(_vector(output).tolist())
        return cls(output.request_id, told, output.prompt_token_ids, output.num_cached_tokens)


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The vector of a prompt, f32[dimensions]."""

    data: F32


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    """A prompt that became a vector, as vLLM's `LLM.encode` tells it."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True

    @classmethod
    def of(cls, output: RequestOutput) -> "PoolingRequestOutput":
        """The same of a request that was asked for a vector and has ended.

        Raises:
            PenstockError: CANCELLED: it was aborted before that.
        """
        told = PoolingOutput(_vector(output))
        return cls(output.request_id, told, output.prompt_token_ids, output.num_cached_tokens)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The likeness of two texts: the cosine between their vectors, -1 to 1, or a cross-encoder's score."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A pair of texts, as vLLM has it."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]  # of both, one after the other, or as a cross-encoder's tokenizer joins them
    num_cached_tokens: int = 0
    finished: bool = True


def scores(outputs: Sequence[RequestOutput], num_first: int) -> list[ScoringRequestOutput]:
    """The pairs of requests that have their vectors: the first `num_first` with the others."""
    first, second = outputs[:num_first], outputs[num_first:]
    pairs = zip([*first] * (len(second) // num_first), second, strict=True)
    return [
        ScoringRequestOutput(
            other.request_id,
            ScoringOutput(cosine(_vector(one), _vector(other))),
            one.prompt_token_ids + other.prompt_token_ids,
            one.num_cached_tokens + other.num_cached_tokens,
        )
        for one, other in pairs
    ]


def pair_scores(outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
    """The pairs that a cross-encoder has scored."""
    return [
        ScoringRequestOutput(
            each.request_id, ScoringOutput(float(_vector(each)[0])), each.prompt_token_ids, each.num_cached_tokens
        )
        for each in outputs
    ]


def _vector(output: RequestOutput) -> F32:
    if output.vector is None:
        raise PenstockError(ErrorCode.CANCELLED, "the request was aborted before its vector was computed")
    return output.vector
