"""The fields of bodies that ask for vectors, and those that other engines have and that are not here."""

from typing import Any, Final

import msgspec

from gateway_svc.core.unsupported import Unsupported


class PooledBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of all such calls. Null means the default."""

    model: str | None = None
    user: str | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    resumable: bool | None = None
    stream: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    pooling_type: str | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    dimensions: int | None = None


class EmbeddingBody(PooledBody, frozen=True, kw_only=True):
    """Texts, token ids or a chat, of which vectors are made."""

    input: str | list[str | int | list[int]] | None = None
    encoding_format: str | None = None
    messages: list[msgspec.Raw] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None


class ScoreBody(PooledBody, frozen=True, kw_only=True):
    """Pairs of texts."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None


class Document(msgspec.Struct, frozen=True):
    """A document that is an object."""

    text: str


class RerankBody(PooledBody, frozen=True, kw_only=True):
    """A text, and documents that are ranked by their likeness to it."""

    query: str | None = None
    documents: list[str | Document] | None = None
    top_n: int | None = None
    return_documents: bool | None = None


EMBEDDING_FIELDS: Final = frozenset(EmbeddingBody.__struct_fields__)
SCORE_FIELDS: Final = frozenset(ScoreBody.__struct_fields__)
RERANK_FIELDS: Final = frozenset(RerankBody.__struct_fields__)

_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "activation": (),
    "softmax": (),
    "embed_dtype": ("float32", "auto"),
    "endianness": ("native", "little"),
    "task": ("embed",),
    "data": (),
    "rank_fields": (["text"],),
    "max_chunks_per_doc": (),
    "max_tokens_per_doc": (),
    "input_type": (),
}
_TRUNCATES = "`truncate_prompt_tokens` is the name here"
_GENERATES = "nothing is generated here; outputs come from /v1/completions and /v1/chat/completions"
_MISPLACED: Final = {
    "max_length": _TRUNCATES,
    **dict.fromkeys(("max_tokens", "temperature", "logprobs", "prompt_logprobs", "n", "stop"), _GENERATES),
    "pooling": "`pooling_type` is the name here",
    "output_dimension": "`dimensions` is the name here",
}
_INPUT = "an embedding takes `input`"
_TEXTS = "a score takes `text_1` and `text_2`"
_RANKED = "a ranking takes `query` and `documents`"
OTHERS_OF_EMBEDDINGS: Final = Unsupported(
    _NEUTRAL, _MISPLACED | dict.fromkeys(("prompt", "inputs", "text", "texts", "input_ids"), _INPUT)
)
OTHERS_OF_SCORES: Final = Unsupported(
    _NEUTRAL,
    _MISPLACED | dict.fromkeys(("queries", "documents", "items", "data_1", "data_2", "input", "query"), _TEXTS),
)
OTHERS_OF_RERANKS: Final = Unsupported(
    _NEUTRAL, _MISPLACED | dict.fromkeys(("text_1", "text_2", "texts", "input", "queries"), _RANKED)
)
