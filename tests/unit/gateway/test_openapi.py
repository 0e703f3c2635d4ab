"""The description of the API: all of its routes and no others, and nothing that is not there."""

import re
from typing import Any

import httpx
import pytest
from running_gateway import RunningGateway

from gateway_svc import http as routes
from gateway_svc import intake
from gateway_svc.core import openapi
from gateway_svc.core.anthropic.fields import MESSAGE_FIELDS
from gateway_svc.core.openai import CHAT_FIELDS, COMPLETION_FIELDS
from gateway_svc.core.openapi import describe
from gateway_svc.core.pooled.fields import EMBEDDING_FIELDS, RERANK_FIELDS, SCORE_FIELDS
from gateway_svc.core.responses.fields import RESPONSE_FIELDS
from gateway_svc.core.vocabulary import DETOKENIZE_FIELDS, TOKENIZE_FIELDS


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {value["$ref"]} if "$ref" in value else {name for each in value.values() for name in references(each)}
    return {name for each in value for name in references(each)} if isinstance(value, list) else set()


def test_every_route_of_the_application_is_described_and_conversely() -> None:
    served = {(path.replace(":path", ""), method.lower()) for path, _, methods in routes.ROUTES for method in methods}
    assert {(path, method) for path, each in describe()["paths"].items() for method in each} == served


def test_the_fields_of_bodies_are_those_that_are_done() -> None:
    schemas = describe()["components"]["schemas"]
    options = {f"stream_options.{name}" for name in schemas["StreamOptions"]["properties"]}
    found = {name: set(schemas[name]["properties"]) for name in schemas if name.endswith("Call")}
    assert found == {
        "CompletionCall": COMPLETION_FIELDS - options,
        "ChatCall": CHAT_FIELDS - options,
        "TokenizeCall": TOKENIZE_FIELDS,
        "DetokenizeCall": DETOKENIZE_FIELDS,
        "ResponseCall": RESPONSE_FIELDS,
        "MessageCall": MESSAGE_FIELDS,
        "EmbeddingCall": EMBEDDING_FIELDS,
        "ScoreCall": SCORE_FIELDS,
        "RerankCall": RERANK_FIELDS,
    }


def test_every_reference_leads_somewhere() -> None:
    described = describe()
    there = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    assert references(described) <= there


def test_every_answer_has_a_status_of_its_own() -> None:
    for path, methods in describe()["paths"].items():
        for each in methods.values():
            assert all(re.fullmatch("[2-5][0-9][0-9]", status) for status in each["responses"]), path
            assert {"200", "400", "408", "429", "431", "500"} <= each["responses"].keys(), path


def test_bounds_of_headers_are_those_that_are_checked() -> None:
    assert (openapi.MAX_TIMEOUT_S, openapi.MAX_CLIENT_ID_CHARS) == (intake.MAX_TIMEOUT_S, intake.MAX_CLIENT_ID_CHARS)


@pytest.mark.parametrize("path", ["/openapi.json", "/docs"])
def test_the_description_and_its_page_are_told_and_load_nothing_from_elsewhere(
    gateway: RunningGateway, path: str
) -> None:
    reply = httpx.get(gateway.url + path, timeout=300)
    assert reply.status_code == 200
    if path == "/openapi.json":
        assert reply.json() == describe()
    else:
        assert reply.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert "://" not in reply.text
        assert "import " not in reply.text
