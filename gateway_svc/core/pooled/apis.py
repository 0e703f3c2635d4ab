"""The APIs whose replies are made of vectors."""

from typing import Final

from contract.domain.errors import PenstockError, invalid
from gateway_svc.core.api import Api
from gateway_svc.core.ask import Form
from gateway_svc.core.pooled.fields import EMBEDDING_FIELDS, RERANK_FIELDS, SCORE_FIELDS
from gateway_svc.core.pooled.parse import parse_embedding, parse_pooling, parse_rerank, parse_score
from gateway_svc.core.pooled.replies import EmbeddingReply, RerankReply, ScoreReply
from gateway_svc.core.replies import error_fields

EMBEDDINGS: Final = Api(
    form=Form.EMBEDDING,
    paths=("/v1/embeddings",),
    parse=parse_embedding,
    known_fields=EMBEDDING_FIELDS,
    reply=EmbeddingReply,
    events=None,
    error_fields=error_fields,
)
POOLINGS: Final = Api(
    form=Form.POOLING,
    paths=("/pooling",),
    parse=parse_pooling,
    known_fields=EMBEDDING_FIELDS,
    reply=EmbeddingReply,
    events=None,
    error_fields=error_fields,
)
SCORES: Final = Api(
    form=Form.SCORE,
    paths=("/score", "/v1/score"),
    parse=parse_score,
    known_fields=SCORE_FIELDS,
    reply=ScoreReply,
    events=None,
    error_fields=error_fields,
)
RERANKS: Final = Api(
    form=Form.RERANK,
    paths=("/rerank", "/v1/rerank", "/v2/rerank"),
    parse=parse_rerank,
    known_fields=RERANK_FIELDS,
    reply=RerankReply,
    events=None,
    error_fields=error_fields,
)
POOLED_APIS: Final = (EMBEDDINGS, POOLINGS, SCORES, RERANKS)


def no_stream(form: Form) -> PenstockError:
    """The error of a call that asks for the event stream of a request which has none."""
    return invalid(
        f"the request is a call for vectors ({form.value}), which has no event stream: its reply is at "
        "/v1/requests/{request_id}",
        "request_id",
    )
