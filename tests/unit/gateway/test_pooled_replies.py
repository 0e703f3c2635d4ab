"""Replies that are made of vectors."""

import base64
import json
from typing import Any

import numpy as np
import pytest

from contract.domain.finish import Usage
from gateway_svc.core.api import Api
from gateway_svc.core.apis import api_of, errors_at
from gateway_svc.core.ask import Form
from gateway_svc.core.pooled.apis import EMBEDDINGS, POOLED_APIS, POOLINGS, RERANKS, SCORES
from gateway_svc.core.prompt_outputs import PromptVector
from gateway_svc.core.replies import ReplyHead, encode, error_fields

X, Y, XY = (np.array(each, np.float32) for each in ([1, 0], [0, 1], [0.6, 0.8]))


def told(api: Api, vectors: list[Any], **context: Any) -> dict[str, Any]:
    head = ReplyHead(api.form, f"{api.form.id_prefix}7", "m", 5, len(vectors), context=json.dumps(context).encode())
    reply = api.reply(head)
    for index, vector in reversed(list(enumerate(vectors))):
        reply.learn_prompt([index], PromptVector(vector))
    body: dict[str, Any] = json.loads(encode(reply.fields([Usage(3, 0, 1)] * len(vectors))))
    return body


def test_embeddings_are_numbers_or_base64_in_the_order_of_the_inputs() -> None:
    body = told(EMBEDDINGS, [X, XY], encoding_format="float")
    assert [each["embedding"] for each in body.pop("data")] == [X.tolist(), XY.tolist()]
    usage = {"prompt_tokens": 6, "completion_tokens": 0, "total_tokens": 6}
    assert body == {
        "id": "embd-7",
        "object": "list",
        "created": 5,
        "model": "m",
        "usage": usage | {"prompt_tokens_details": {"cached_tokens": 2}},
    }
    packed = told(EMBEDDINGS, [XY], encoding_format="base64")["data"][0]
    assert packed["object"] == "embedding"
    assert np.frombuffer(base64.b64decode(packed["embedding"]), "<f4").tolist() == XY.tolist()
    pooled = told(POOLINGS, [Y], encoding_format="float")["data"]
    assert pooled == [{"object": "pooling", "index": 0, "data": [0.0, 1.0]}]


def test_scores_are_cosines_of_pairs_or_of_the_first_with_each() -> None:
    one = told(SCORES, [X, X, Y, XY], num_first=1)["data"]
    assert [each["score"] for each in one] == pytest.approx([1, 0, 0.6])
    pairs = told(SCORES, [X, Y, 2 * X, XY], num_first=2)["data"]
    assert [(each["index"], each["score"]) for each in pairs] == [(0, 1.0), (1, pytest.approx(0.8))]


def test_the_likest_documents_come_first() -> None:
    body = told(RERANKS, [X, Y, X, XY], top_n=2, documents=["y", "x", "xy"])
    assert [(each["index"], each["document"]["text"]) for each in body["results"]] == [(1, "x"), (2, "xy")]
    assert [each["relevance_score"] for each in body["results"]] == pytest.approx([1, 0.6])
    without = told(RERANKS, [X, Y], top_n=1, documents=None)["results"]
    assert without == [{"index": 0, "relevance_score": 0.0}]


def test_every_form_has_one_api_and_errors_in_its_shape() -> None:
    assert [api_of(form) for form in Form if form.is_pooled] == list(POOLED_APIS)
    for api in POOLED_APIS:
        assert api.events is None
        assert all(errors_at(path) is error_fields for path in api.paths)
