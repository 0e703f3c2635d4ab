"""Bodies that ask for vectors: what they become, and what is refused by name."""

import json
from typing import Any

import pytest
from known_models import Known

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.pooling import SCORED, Pooling, PoolingFacts, PoolingKind
from contract.domain.request import Prompt
from gateway_svc.core.ask import Ask, Form
from gateway_svc.core.pooled import parse as pooled_parse
from gateway_svc.core.pooled.apis import EMBEDDINGS, POOLED_APIS, POOLINGS, RERANKS, SCORES

INPUT: dict[str, Any] = {"input": "a"}
SCORE: dict[str, Any] = {"text_1": "a", "text_2": ["b"]}
RERANK: dict[str, Any] = {"query": "a", "documents": ["b", "c"]}
BODIES = {Form.EMBEDDING: INPUT, Form.POOLING: INPUT, Form.SCORE: SCORE, Form.RERANK: RERANK}
EVERY = pytest.mark.parametrize("api", POOLED_APIS, ids=lambda api: api.form.value)


def parse(api: Any, body: dict[str, Any], facts: PoolingFacts | None = None) -> Ask:
    models = Known()
    if facts is not None:
        models.pooling = lambda name: facts  # type: ignore[method-assign]
    ask: Ask = api.parse(json.dumps(body).encode(), models)
    return ask


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", [Prompt(text="a")]),
        (["a", "b"], [Prompt(text="a"), Prompt(text="b")]),
        ([1, 2], [Prompt(token_ids=(1, 2))]),
        ([[1], [2, 3]], [Prompt(token_ids=(1,)), Prompt(token_ids=(2, 3))]),
    ],
)
def test_inputs_are_texts_or_token_ids_and_each_is_a_request(given: Any, prompts: list[Prompt]) -> None:
    ask = parse(EMBEDDINGS, {"input": given})
    assert ask.prompts == tuple(prompts)
    assert ask.pooling == Pooling()
    assert (ask.stream, ask.params.n, ask.num_choices) == (False, 1, len(prompts))


def test_a_chat_is_rendered_without_the_beginning_of_an_answer() -> None:
    ask = parse(EMBEDDINGS, {"messages": [{"role": "user", "content": "a"}]})
    (prompt,) = ask.prompts
    assert prompt.messages is not None
    assert prompt.chat_template_kwargs == {"add_generation_prompt": False}
    with pytest.raises(PenstockError, match="either input or messages"):
        parse(EMBEDDINGS, {**INPUT, "messages": [{"role": "user", "content": "a"}]})


@EVERY
def test_what_the_request_says_goes_before_what_the_checkpoint_says(api: Any) -> None:
    facts = PoolingFacts(PoolingKind.MEAN, normalize=False, size=8)
    body = BODIES[api.form]
    assert parse(api, body, facts).pooling == Pooling(PoolingKind.MEAN, normalize=False)
    said = {"pooling_type": "cls", "normalize": True, "dimensions": 8}
    assert parse(api, body | said, facts).pooling == Pooling(PoolingKind.CLS, normalize=True, dimensions=8)
    assert parse(api, body | {"use_activation": True}, facts).pooling == Pooling(PoolingKind.MEAN, normalize=True)


@EVERY
@pytest.mark.parametrize(
    ("said", "param", "code"),
    [
        ({"stream": True}, "stream", ErrorCode.UNIMPLEMENTED),
        ({"dimensions": 65}, "dimensions", ErrorCode.INVALID_ARGUMENT),
        ({"dimensions": 0}, "dimensions", ErrorCode.INVALID_ARGUMENT),
        ({"pooling_type": "max"}, "pooling_type", ErrorCode.INVALID_ARGUMENT),
        ({"add_special_tokens": False}, "add_special_tokens", ErrorCode.INVALID_ARGUMENT),
        ({"normalize": True, "use_activation": False}, "use_activation", ErrorCode.INVALID_ARGUMENT),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ErrorCode.INVALID_ARGUMENT),
        ({"max_tokens": 5}, "max_tokens", ErrorCode.INVALID_ARGUMENT),
        ({"embed_dtype": "float16"}, "embed_dtype", ErrorCode.UNIMPLEMENTED),
        ({"task": "token_embed"}, "task", ErrorCode.UNIMPLEMENTED),
        ({"priority": 2**31}, "priority", ErrorCode.INVALID_ARGUMENT),
    ],
)
def test_what_is_not_done_is_refused_by_name(api: Any, said: dict[str, Any], param: str, code: ErrorCode) -> None:
    with pytest.raises(PenstockError) as caught:
        parse(api, BODIES[api.form] | said)
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(
    ("api", "body", "param"),
    [
        (EMBEDDINGS, {}, "input"),
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"input": [[]]}, "input"),
        (EMBEDDINGS, {"input": ["a", 1]}, "input"),
        (EMBEDDINGS, {"input": ["a"] * 2049}, "input"),
        (EMBEDDINGS, {"prompt": "a"}, "prompt"),
        (EMBEDDINGS, INPUT | {"encoding_format": "bytes"}, "encoding_format"),
        (POOLINGS, {"data": {"a": 1}}, "data"),
        (SCORES, {"text_1": "a"}, "text_2"),
        (SCORES, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        (SCORES, SCORE | {"queries": "a"}, "queries"),
        (RERANKS, {"documents": ["a"]}, "query"),
        (RERANKS, {"query": "a", "documents": []}, "documents"),
        (RERANKS, RERANK | {"top_n": -1}, "top_n"),
        (RERANKS, RERANK | {"rank_fields": ["title"]}, "rank_fields"),
    ],
)
def test_what_is_missing_or_wrong_is_named(api: Any, body: dict[str, Any], param: str) -> None:
    with pytest.raises(PenstockError) as caught:
        parse(api, body)
    assert caught.value.param == param


def test_the_pooling_of_a_checkpoint_that_is_not_done_is_done_without_only_by_request() -> None:
    facts = PoolingFacts(size=8, trouble="the module 'Dense' of modules.json")
    with pytest.raises(PenstockError, match="Dense") as caught:
        parse(EMBEDDINGS, INPUT, facts)
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNIMPLEMENTED, "pooling_type")
    assert parse(EMBEDDINGS, INPUT | {"pooling_type": "LAST"}, facts).pooling == Pooling()


def test_a_score_of_one_text_with_others_asks_for_it_once() -> None:
    ask = parse(SCORES, {"text_1": "a", "text_2": ["b", "c"]})
    assert [each.text for each in ask.prompts] == ["a", "b", "c"]
    ranked = parse(RERANKS, {"query": "a", "documents": ["b", {"text": "c"}]})
    assert [each.text for each in ranked.prompts] == ["a", "b", "c"]


def test_fields_that_nobody_knows_are_told() -> None:
    assert parse(EMBEDDINGS, INPUT | {"nonsense": 1, "user": "me"}).ignored_fields == ("nonsense",)


SCORING = PoolingFacts(scores_pairs=True)


@pytest.mark.parametrize("api", [EMBEDDINGS, POOLINGS], ids=lambda api: api.form.value)
def test_a_model_that_scores_pairs_makes_no_vectors(api: Any) -> None:
    with pytest.raises(PenstockError, match="is a cross-encoder") as caught:
        parse(api, INPUT, SCORING)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARGUMENT, "model")


def test_texts_that_it_compares_are_pairs() -> None:
    one = parse(SCORES, {"text_1": "a", "text_2": ["b", "c"]}, SCORING)
    assert one.prompts == (Prompt(pair=("a", "b")), Prompt(pair=("a", "c")))
    assert (one.pooling, json.loads(one.context)["num_first"]) == (SCORED, 0)
    each = parse(SCORES, {"text_1": ["a", "b"], "text_2": ["c", "d"]}, SCORING)
    assert each.prompts == (Prompt(pair=("a", "c")), Prompt(pair=("b", "d")))
    ranked = parse(RERANKS, RERANK, SCORING)
    assert ranked.prompts == (Prompt(pair=("a", "b")), Prompt(pair=("a", "c")))
    assert (ranked.pooling, json.loads(ranked.context)["num_first"]) == (SCORED, 0)


@pytest.mark.parametrize("field", [{"pooling_type": "mean"}, {"dimensions": 2}, {"normalize": False}])
def test_of_a_score_nothing_is_asked_that_a_vector_has(field: dict[str, Any]) -> None:
    assert parse(SCORES, {**SCORE, "normalize": True}, SCORING).pooling == SCORED
    with pytest.raises(PenstockError, match="cross-encoder") as caught:
        parse(SCORES, {**SCORE, **field}, SCORING)
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNIMPLEMENTED, next(iter(field)))


def test_nobody_asks_for_scores_as_a_pooling() -> None:
    with pytest.raises(PenstockError, match="one of LAST, MEAN, CLS"):
        parse(EMBEDDINGS, {**INPUT, "pooling_type": "SCORE"})


def test_pairs_are_bounded_together_since_a_query_is_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooled_parse, "MAX_PAIR_CHARS", 100)
    body = {"query": "q" * 40, "documents": ["d" * 10] * 2}
    assert len(parse(RERANKS, body, SCORING).prompts) == 2
    with pytest.raises(PenstockError, match="150 characters together") as caught:
        parse(RERANKS, body | {"documents": ["d" * 10] * 3}, SCORING)
    assert caught.value.param == "documents"
    assert len(parse(RERANKS, body | {"documents": ["d" * 10] * 3}).prompts) == 4
    with pytest.raises(PenstockError, match="102 characters together"):
        parse(SCORES, {"text_1": ["q" * 30] * 2, "text_2": ["d" * 21] * 2}, SCORING)
