"""Bodies that ask for vectors: JSON in, the prompts that become such and how to answer out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from contract.domain.errors import invalid, unimplemented
from contract.domain.params import SamplingParams
from contract.domain.pooling import PoolingParams
from contract.domain.request import Prompt, check_cache_salt
from gateway_svc.core.ask import Ask, Form, Models
from gateway_svc.core.bodies import body_fields, check_priority, decode_body, decode_messages
from gateway_svc.core.field_names import FieldName, FieldNames, in_words_of
from gateway_svc.core.messages import parse_messages
from gateway_svc.core.pooled.fields import (
    EMBEDDING_FIELDS,
    OTHERS_OF_EMBEDDINGS,
    OTHERS_OF_RERANKS,
    OTHERS_OF_SCORES,
    RERANK_FIELDS,
    SCORE_FIELDS,
    Document,
    EmbeddingBody,
    PooledBody,
    RerankBody,
    ScoreBody,
)
from gateway_svc.core.prompts import parse_prompts
from gateway_svc.core.template_fields import required_variables, template_kwargs
from gateway_svc.core.unsupported import check_fields

MAX_INPUTS = 2048  # of one call, as OpenAI has it
MAX_PAIR_CHARS = 2**24  # of a call's pairs together: a text that is in many counts in each
ENCODINGS = ("float", "base64")

_INPUT = (FieldName("prompt", "input"),)
_embedding = msgspec.json.Decoder(EmbeddingBody)
_score = msgspec.json.Decoder(ScoreBody)
_rerank = msgspec.json.Decoder(RerankBody)
_json = msgspec.json.Encoder()
FLOATS = {"encoding_format": ENCODINGS[0]}  # the context of embeddings that are told as numbers


def parse_embedding(body: bytes, models: Models, form: Form = Form.EMBEDDING) -> Ask:
    """The body of `POST /v1/embeddings`, or of `POST /pooling`.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED naming the field; what `models` raises.
    """
    ignored = check_fields(form.value, body_fields(body), EMBEDDING_FIELDS, OTHERS_OF_EMBEDDINGS)
    raw = decode_body(_embedding, body)
    encoding = raw.encoding_format or ENCODINGS[0]
    if encoding not in ENCODINGS:
        raise unimplemented("encoding_format", f"encoding_format {encoding!r:.40} (there are: {', '.join(ENCODINGS)})")
    ask = ask_vectors(form, raw, _inputs(raw), models, {"encoding_format": encoding}, names=_INPUT)
    return replace(ask, ignored_fields=ignored)


def parse_pooling(body: bytes, models: Models) -> Ask:
    """The body of `POST /pooling`; raises as `parse_embedding`."""
    return parse_embedding(body, models, Form.POOLING)


def parse_score(body: bytes, models: Models) -> Ask:
    """The body of `POST /score`: one text and others, or as many as others.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED naming the field; what `models` raises.
    """
    ignored = check_fields(Form.SCORE.value, body_fields(body), SCORE_FIELDS, OTHERS_OF_SCORES)
    return replace(ask_scores(decode_body(_score, body), models), ignored_fields=ignored)


def ask_scores(raw: ScoreBody, models: Models) -> Ask:
    """The texts of pairs, the first of each before all others; raises as `parse_score`."""
    first, second = _texts("text_1", raw.text_1), _texts("text_2", raw.text_2)
    if len(first) not in (1, len(second)):
        raise invalid(f"text_1 must be one text, or as many as text_2: {len(first)} and {len(second)}", "text_1")
    scores_pairs = models.pooling(raw.model or "").scores_pairs
    prompts = _compared(first, second, "text_2", scores_pairs=scores_pairs)
    names: FieldNames = (FieldName("prompt", "text_1"), FieldName("prompt", "text_2", since=len(first)))
    names = (FieldName("prompt", "text_2"),) if scores_pairs else names
    context = {"num_first": 0 if scores_pairs else len(first)}
    return ask_vectors(Form.SCORE, raw, prompts, models, context, names=names, scores_pairs=scores_pairs)


def parse_rerank(body: bytes, models: Models) -> Ask:
    """The body of `POST /rerank`.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED naming the field; what `models` raises.
    """
    ignored = check_fields(Form.RERANK.value, body_fields(body), RERANK_FIELDS, OTHERS_OF_RERANKS)
    return replace(ask_ranking(decode_body(_rerank, body), models), ignored_fields=ignored)


def ask_ranking(raw: RerankBody, models: Models) -> Ask:
    """The query, and after it the documents; raises as `parse_rerank`."""
    if not raw.query:
        raise invalid("query is missing", "query")
    given = [each.text if isinstance(each, Document) else each for each in raw.documents or ()]
    documents = _texts("documents", given)
    if raw.top_n is not None and raw.top_n < 0:
        raise invalid(f"top_n must be at least 1, or 0 for all documents, got {raw.top_n}", "top_n")
    told = documents if raw.return_documents is not False else None
    scores_pairs = models.pooling(raw.model or "").scores_pairs
    prompts = _compared([raw.query], documents, "documents", scores_pairs=scores_pairs)
    names: FieldNames = (FieldName("prompt", "query"), FieldName("prompt", "documents", since=1))
    context = {"top_n": raw.top_n or len(documents), "documents": told, "num_first": 0 if scores_pairs else 1}
    names = (FieldName("prompt", "documents"),) if scores_pairs else names
    return ask_vectors(Form.RERANK, raw, prompts, models, context, names=names, scores_pairs=scores_pairs)


def _compared(first: Sequence[str], second: Sequence[str], name: str, *, scores_pairs: bool) -> list[Prompt]:
    """The prompts that compare one text with others, or as many with as many: pairs that a cross-encoder scores, or the
    first texts and after them the others. `name`: of the field of the others.

    Raises:
        PenstockError: INVALID_ARGUMENT: pairs are too large together, since each has both of its texts.
    """
    if not scores_pairs:
        return [Prompt(text=text) for text in (*first, *second)]
    num_chars = sum(map(len, second)) + sum(map(len, first)) * (len(second) // len(first))
    if num_chars > MAX_PAIR_CHARS:
        raise invalid(
            f"the pairs have {num_chars} characters together, in which a text counts for each one that it is compared "
            f"with; at most {MAX_PAIR_CHARS} in one call",
            name,
        )
    pairs = zip([*first] * (len(second) if len(first) == 1 else 1), second, strict=True)
    return [Prompt(pair=pair) for pair in pairs]


def ask_vectors(
    form: Form,
    raw: PooledBody,
    prompts: Sequence[Prompt],
    models: Models,
    context: Mapping[str, Any],
    *,
    names: FieldNames,
    scores_pairs: bool = False,
) -> Ask:
    """Prompts that become vectors.

    Args:
        form: of the reply.
        raw: how.
        prompts: each is a request.
        models: by which the call is read.
        context: what the reply needs of the call.
        names: that the caller has for fields.
        scores_pairs: they are pairs, and become scores.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED naming the field; what `models` raises.
    """
    facts = models.pooling(raw.model or "")
    if raw.normalize is None and raw.use_activation is not None:
        names = (*names, FieldName("normalize", "use_activation"))
    with in_words_of(names):
        pooling = (facts.scoring if scores_pairs else facts.pooling)(_pooling_params(raw))
    if raw.stream:
        raise unimplemented("stream", "an event stream of vectors")
    if raw.add_special_tokens is False:
        raise invalid(
            "add_special_tokens cannot be false: give token ids to decide about special tokens yourself",
            "add_special_tokens",
        )
    if len(prompts) > MAX_INPUTS:
        raise invalid(f"at most {MAX_INPUTS} texts in one call, got {len(prompts)}", names[-1].written)
    return Ask(
        form=form,
        model=raw.model or "",
        prompts=tuple(prompts),
        # Nothing is drawn; a request ends before it might be.
        params=SamplingParams(
            temperature=0.0,
            max_tokens=1,
            truncate_prompt_tokens=raw.truncate_prompt_tokens,
            truncation_side=raw.truncation_side,
        ),
        priority=check_priority(raw.priority),
        is_resumable=bool(raw.resumable),
        cache_salt="" if raw.cache_salt is None else check_cache_salt(raw.cache_salt),
        client_id=raw.request_id,
        context=_json.encode(context),
        pooling=pooling,
        names=names,
    )


def _pooling_params(raw: PooledBody) -> PoolingParams:
    """vLLM has two names for one thing."""
    if None not in (raw.normalize, raw.use_activation) and raw.normalize != raw.use_activation:
        raise invalid("normalize and use_activation contradict each other", "use_activation")
    normalize = raw.use_activation if raw.normalize is None else raw.normalize
    return PoolingParams(pooling_type=raw.pooling_type, normalize=normalize, dimensions=raw.dimensions)


def _inputs(raw: EmbeddingBody) -> Sequence[Prompt]:
    if (raw.input is None) == (raw.messages is None):
        raise invalid("give either input or messages", "input")
    if raw.messages is None:
        return parse_prompts(raw.input, "input", MAX_INPUTS)
    kwargs = {"add_generation_prompt": False} | (template_kwargs(raw) or {})
    messages = parse_messages(decode_messages(raw.messages))
    return (Prompt(messages=messages, chat_template_kwargs=kwargs, required_variables=required_variables(raw)),)


def _texts(name: str, given: str | list[str] | None) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not texts:
        raise invalid(f"{name} is missing, or is an empty list", name)
    return texts
