"""Vectors of prompts and the likeness of texts over gRPC: what may be asked, and what is told."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from contract.domain.errors import invalid
from contract.domain.finish import Usage
from contract.domain.pooling import PoolingParams, kind_of
from contract.domain.request import check_cache_salt
from contract.v1 import common_pb2, inference_pb2
from penstock.client.questions import Question
from penstock.client.wire import Chat, set_prompt

_SIDES = {None: False, "left": False, "right": True}  # at which tokens are left out


class VectorOptions(TypedDict, total=False):
    """The options of calls for vectors, beside prompts and parameters."""

    model: str  # empty: the one that is served
    priority: int  # lower is served first
    timeout_s: float | None  # the requests' deadline; the pipeline gives them up then
    # 1 to 255 visible ASCII characters; a call of the same tenant with the same key is the same, so that one that broke
    # may be made again.
    idempotency_key: str | None
    cache_salt: str | None  # 1 to 255 bytes; cached prefixes of requests with the same salt are found, and no others


@dataclass(frozen=True, slots=True)
class Embedding:
    """A prompt that became a vector."""

    request_id: str  # 32 hexadecimal digits
    model: str
    embedding: list[float]
    usage: Usage
    system_fingerprint: str = ""  # of the model


@dataclass(frozen=True, slots=True)
class Scores:
    """The likeness of pairs of texts."""

    request_id: str  # of the first of its requests, 32 hexadecimal digits
    model: str
    scores: list[float]  # cosines, -1 to 1, or a cross-encoder's
    usage: Usage  # of all requests
    system_fingerprint: str = ""  # of the model


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document with its likeness to the query."""

    index: int  # among those of the call
    relevance_score: float  # cosine, -1 to 1, or a cross-encoder's score


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents by their likeness to a text, the likest first."""

    request_id: str  # of the first of its requests, 32 hexadecimal digits
    model: str
    results: list[RankedDocument]
    usage: Usage  # of all requests
    system_fingerprint: str = ""  # of the model


def ask_embedding(
    prompt: str | Sequence[int] | None, messages: Chat | None, params: PoolingParams | None, options: VectorOptions
) -> Question[Embedding]:
    """The vector of one prompt.

    Raises:
        PenstockError: INVALID_ARGUMENT: not exactly one of prompt and messages, or one of the wrong type.
    """
    asked = params or PoolingParams()
    call = inference_pb2.EmbedCall(**_fields(asked, options), normalize=asked.normalize)
    set_prompt(call, prompt, messages)

    def read(reply: inference_pb2.EmbedReply) -> Embedding:
        values = np.frombuffer(reply.values, "<f4").tolist()
        return Embedding(reply.request_id, reply.model, values, _usage(reply.usage), reply.system_fingerprint)

    return Question("Embed", call, read, options.get("timeout_s"))


def ask_scores(
    text_1: str | Sequence[str], text_2: str | Sequence[str], params: PoolingParams | None, options: VectorOptions
) -> Question[Scores]:
    """The likeness of pairs of texts.

    Raises:
        PenstockError: INVALID_ARGUMENT: something is no text.
    """
    fields = _fields(params or PoolingParams(), options)
    call = inference_pb2.ScoreCall(**fields, text_1=_texts("text_1", text_1), text_2=_texts("text_2", text_2))

    def read(reply: inference_pb2.ScoreReply) -> Scores:
        return Scores(reply.request_id, reply.model, [*reply.scores], _usage(reply.usage), reply.system_fingerprint)

    return Question("Score", call, read, options.get("timeout_s"))


def ask_ranking(
    query: str, documents: Sequence[str], params: PoolingParams | None, top_n: int, options: VectorOptions
) -> Question[Ranking]:
    """Documents by their likeness to a text.

    Raises:
        PenstockError: INVALID_ARGUMENT: something is no text, or `top_n` is less than 0.
    """
    if type(top_n) is not int or top_n < 0:
        raise invalid(f"top_n must be at least 1, or 0 for all documents, got {top_n!r:.40}", "top_n")
    fields = _fields(params or PoolingParams(), options)
    (text,) = _texts("query", query)
    call = inference_pb2.RerankCall(**fields, query=text, documents=_texts("documents", documents), top_n=top_n)

    def read(reply: inference_pb2.RerankReply) -> Ranking:
        results = [RankedDocument(each.index, each.relevance_score) for each in reply.results]
        return Ranking(reply.request_id, reply.model, results, _usage(reply.usage), reply.system_fingerprint)

    return Question("Rerank", call, read, options.get("timeout_s"))


def _fields(params: PoolingParams, options: VectorOptions) -> dict[str, Any]:
    """The fields that all such calls have."""
    salt = options.get("cache_salt")
    return {
        "model": options.get("model", ""),
        "kind": None if params.pooling_type is None else common_pb2.PoolingKind.ValueType(kind_of(params.pooling_type)),
        "dimensions": params.dimensions or 0,
        "truncate_prompt_tokens": params.truncate_prompt_tokens,
        "truncates_at_end": _SIDES[params.truncation_side],
        "priority": options.get("priority", 0),
        "cache_salt": "" if salt is None else check_cache_salt(salt),
        "idempotency_key": options.get("idempotency_key") or "",
    }


def _texts(name: str, given: str | Sequence[str]) -> list[str]:
    texts = [given] if isinstance(given, str) else [*given]
    if wrong := [each for each in texts if not isinstance(each, str)]:
        raise invalid(f"{name} must be text, got {wrong[0]!r:.80}", name)
    return texts


def _usage(usage: common_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.output_tokens, usage.cached_tokens)
