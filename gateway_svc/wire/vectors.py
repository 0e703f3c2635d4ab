"""Calls of gRPC clients for vectors and for the likeness of texts, and their answers."""

from typing import Any, TypeAlias

import msgspec

from contract.domain.pooling import PoolingKind
from contract.v1 import inference_pb2
from contract.wire.deltas import encode_usage
from gateway_svc.core.ask import Ask, Form, Models
from gateway_svc.core.field_names import FieldName, in_words_of
from gateway_svc.core.pooled.fields import PooledBody, RerankBody, ScoreBody
from gateway_svc.core.pooled.outcome import PooledOutcome
from gateway_svc.core.pooled.parse import FLOATS, ask_ranking, ask_scores, ask_vectors
from gateway_svc.core.pooled.replies import cosines, ranked
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.wire.prompts import decode_prompt, prompt_name

VectorCall: TypeAlias = inference_pb2.EmbedCall | inference_pb2.ScoreCall | inference_pb2.RerankCall

_NAMES = FieldName("pooling_type", "kind"), FieldName("truncation_side", "truncates_at_end")
_RIGHT = "right"  # the side at which tokens are left out


def decode_embed(call: inference_pb2.EmbedCall, models: Models) -> Ask:
    """The prompt that becomes a vector.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED naming the field; what `models` raises.
    """
    body = PooledBody(**_fields(call), normalize=call.normalize if call.HasField("normalize") else None)
    with in_words_of(_NAMES):
        return ask_vectors(Form.EMBEDDING, body, [decode_prompt(call)], models, FLOATS, names=(prompt_name(call),))


def decode_score(call: inference_pb2.ScoreCall, models: Models) -> Ask:
    """The texts of pairs; raises as `decode_embed`."""
    with in_words_of(_NAMES):
        return ask_scores(ScoreBody(**_fields(call), text_1=[*call.text_1], text_2=[*call.text_2]), models)


def decode_rerank(call: inference_pb2.RerankCall, models: Models) -> Ask:
    """The text and the documents that are compared with it; raises as `decode_embed`."""
    body = RerankBody(
        **_fields(call), query=call.query, documents=[*call.documents], top_n=call.top_n, return_documents=False
    )
    with in_words_of(_NAMES):
        return ask_ranking(body, models)


def embed_reply(form: ReplyForm, outcome: PooledOutcome) -> inference_pb2.EmbedReply:
    """The vector of a prompt."""
    (vector,) = outcome.vectors
    return inference_pb2.EmbedReply(
        request_id=form.shown_id,
        model=form.model,
        values=vector.astype("<f4", copy=False).tobytes(),
        usage=encode_usage(outcome.usage),
        system_fingerprint=outcome.fingerprint,
    )


def score_reply(form: ReplyForm, outcome: PooledOutcome, num_first: int) -> inference_pb2.ScoreReply:
    """The likeness of pairs, of which so many texts are the first."""
    return inference_pb2.ScoreReply(
        request_id=form.shown_id,
        model=form.model,
        scores=scores_of(form, outcome, num_first),
        usage=encode_usage(outcome.usage),
        system_fingerprint=outcome.fingerprint,
    )


def scores_of(form: ReplyForm, outcome: PooledOutcome, num_first: int) -> list[float]:
    """The scores of pairs, of which so many texts are the first: of vectors, or of a cross-encoder."""
    are_scores = msgspec.json.decode(form.context).get("num_first") == 0
    return cosines(outcome.vectors, 0 if are_scores else num_first)


def rerank_reply(form: ReplyForm, outcome: PooledOutcome, top_n: int) -> inference_pb2.RerankReply:
    """The documents with the best scores, so many, or all where that is 0."""
    scores = scores_of(form, outcome, 1)
    return inference_pb2.RerankReply(
        request_id=form.shown_id,
        model=form.model,
        results=[
            inference_pb2.RankedDocument(index=index, relevance_score=scores[index])
            for index in ranked(scores, top_n or len(scores))
        ],
        usage=encode_usage(outcome.usage),
        system_fingerprint=outcome.fingerprint,
    )


def _fields(call: VectorCall) -> dict[str, Any]:
    """The fields that all such calls have, as bodies have them; an empty one says nothing."""
    return {
        "model": call.model,
        "pooling_type": _kind_name(call.kind) if call.kind else None,
        "dimensions": call.dimensions or None,
        "truncate_prompt_tokens": call.truncate_prompt_tokens if call.HasField("truncate_prompt_tokens") else None,
        "truncation_side": _RIGHT if call.truncates_at_end else None,
        "priority": call.priority,
        "cache_salt": call.cache_salt or None,
    }


def _kind_name(number: int) -> str:
    """The name of a kind of pooling; its number, where there is none."""
    return PoolingKind(number).name if number in PoolingKind.__members__.values() else str(number)
