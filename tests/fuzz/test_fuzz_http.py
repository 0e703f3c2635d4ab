"""Random bytes, headers and mutated JSON to every HTTP route: no 500, errors of one shape, and life goes on."""

import json
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fired_at import FiredAt
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import EXTREMES, ROUNDS, SEED, TEXTS, mutated, random_bytes

from contract.domain.errors import PenstockError
from contract.domain.generation_defaults import OPENAI_DEFAULTS
from contract.domain.pooling import PLAIN_POOLING
from gateway_svc.core.anthropic.parse import parse_message
from gateway_svc.core.formats.choice import NO_FORMATS
from gateway_svc.core.openai import parse_chat, parse_completion
from gateway_svc.core.pooled.apis import POOLED_APIS
from gateway_svc.core.pooled.parse import parse_rerank, parse_score
from gateway_svc.core.responses.parse import parse_response
from gateway_svc.core.vocabulary import parse_detokenize, parse_tokenize

COMPLETION: dict[str, Any] = {
    "model": "simulated", "prompt": [1, 2, 3], "n": 1, "temperature": 0.5, "top_p": 1, "top_k": 3, "min_p": 0.1,
    "repetition_penalty": 1.1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {"5": 1}, "seed": 7,
    "max_tokens": 3, "min_tokens": 1, "stop": ["zz"], "stop_token_ids": [9], "ignore_eos": True, "priority": 1,
    "user": "u", "stream": True, "stream_options": {"include_usage": True}, "logprobs": 2, "echo": False,
    "return_tokens_as_token_ids": True, "return_token_ids": True, "stream_interval": 2,
    "skip_special_tokens": True, "include_stop_str_in_output": True,
}  # fmt: skip
CHAT: dict[str, Any] = {
    **{name: value for name, value in COMPLETION.items() if name not in ("prompt", "logprobs", "echo")},
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "n"}],
    "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 3, "chat_template_kwargs": {"x": 1}, "tools": [],
}  # fmt: skip
TOKENIZE = {"model": "simulated", "prompt": "hi", "add_special_tokens": True, "return_token_strs": True, "tools": None}
DETOKENIZE = {"model": "simulated", "tokens": [1, 2, 3]}
RESPONSE = {
    **{name: CHAT[name] for name in ("temperature", "stream", "top_logprobs") if name in CHAT},
    "model": "simulated", "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    "include": ["message.output_text.logprobs"], "max_output_tokens": 3, "tools": [], "text": {"format": None},
    "reasoning": {"effort": None}, "tool_choice": "auto", "instructions": "x", "metadata": {},
}  # fmt: skip
MESSAGE = {
    "model": "simulated", "max_tokens": 3, "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "system": [{"type": "text", "text": "x"}], "tools": [], "tool_choice": {"type": "auto"}, "stop_sequences": ["x"],
    "thinking": {"type": "adaptive"}, "output_config": {"format": None}, "metadata": {"user_id": "u"}, "stream": False,
}  # fmt: skip
EMBEDDING = {
    "model": "simulated", "input": ["hi", "x"], "encoding_format": "base64", "dimensions": 3, "pooling_type": "mean",
    "normalize": False, "truncate_prompt_tokens": 5, "user": "u", "stream": False,
}  # fmt: skip
SCORE = {"model": "simulated", "text_1": "hi", "text_2": ["x", "y"], "normalize": True}
RERANK = {"query": "hi", "documents": ["x", {"text": "y"}], "top_n": 1, "return_documents": False}
BODIES = {  # the others take chats
    "/tokenize": TOKENIZE, "/detokenize": DETOKENIZE, "/v1/completions": COMPLETION, "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE, "/v1/messages/count_tokens": MESSAGE, "/v1/embeddings": EMBEDDING, "/pooling": EMBEDDING,
    "/score": SCORE, "/v1/rerank": RERANK,
}  # fmt: skip
_MODELS: Any = SimpleNamespace(
    defaults=lambda _: OPENAI_DEFAULTS, formats=lambda _: NO_FORMATS, pooling=lambda _: PLAIN_POOLING
)
ROUTES = (
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/%s"),
    ("GET", "/v1/requests/%s"), ("DELETE", "/v1/requests/%s"), ("GET", "/v1/requests/%s/events"), ("GET", "/health"),
    ("GET", "/ready"), ("GET", "/metrics"), ("GET", "/version"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("POST", "/v1/chat/completions/render"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/load"),
    ("GET", "/openapi.json"), ("GET", "/docs"), ("POST", "/v1/responses"), ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"), ("POST", "/v1/embeddings"), ("POST", "/pooling"), ("POST", "/score"),
    ("POST", "/v1/rerank"),
)  # fmt: skip
HEADERS = ("x-request-timeout-s", "last-event-id", "idempotency-key", "traceparent", "authorization", "x-request-id",
           "content-type", "content-encoding", "expect", "x-penstock-resumable", "accept", "x-penstock-event-ids",
           "origin", "access-control-request-method")  # fmt: skip
STRANGE = (None, True, -1, 0, 1e308, "", "x", [], {}, [None], [[]], {"a": {}}, [1, "x"], *EXTREMES, *TEXTS)


def strange_json(dice: random.Random, valid: dict[str, Any]) -> bytes:
    """A body with fields that are missing or of other types and sizes, sometimes no JSON at all."""
    body = {
        name: value for name, value in valid.items() if dice.random() < 0.6 or name in ("prompt", "messages", "input")
    }
    for _ in range(dice.randrange(3)):
        body[dice.choice([*valid, "unknown"])] = dice.choice(STRANGE)
    content = json.dumps(body).encode()
    return mutated(dice, content) if dice.random() < 0.3 else content


def headers(dice: random.Random) -> dict[str, bytes]:
    values = ("1", "0", "-1", "nan", "1e999", "x" * 300, "é".encode("latin-1").decode("latin-1"), "Bearer x", "0-0")
    names = dice.sample(HEADERS, dice.randrange(3))
    usual = {"content-type": b"application/json"}
    return usual | {name: dice.choice(values).encode("latin-1") for name in names}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_answers_or_says_what_is_wrong(pipeline: FiredAt, method: str, path: str) -> None:
    dice = random.Random(f"{SEED} {method} {path}")
    with httpx.Client(base_url=pipeline.url, timeout=300) as http:
        for _ in range(ROUNDS):
            body = b""
            if method == "POST":
                body = strange_json(dice, BODIES.get(path, CHAT))
                if dice.random() < 0.1:
                    body = random_bytes(dice)
            name = dice.choice(("x", "0" * 32, "cmpl-" + "a" * 32, "%00", "..%2f..", "é", "%ff"))
            url = path % name if "%s" in path else path
            used = dice.choice((method, method, method, "PUT", "GET", "POST", "DELETE", "PATCH"))
            reply = http.request(used, url, content=body, headers=headers(dice))
            assert reply.status_code < 500 or reply.status_code == 504, (used, url, body, reply.text)
            if reply.status_code >= 400:
                assert reply.headers["content-type"] == "application/json", (used, url, reply.text)
                error = reply.json()["error"]
                is_anthropics = path.startswith("/v1/messages")
                assert set(error) == ({"message", "type"} if is_anthropics else {"message", "type", "param", "code"})
                assert error["message"]
    pipeline.check_alive()


def test_bytes_that_are_no_http_break_one_connection(pipeline: FiredAt) -> None:
    dice = random.Random(SEED)
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n"
        + b'{"prompt": [1, 2]}   '
    )
    for _ in range(ROUNDS):
        with socket.create_connection(("127.0.0.1", pipeline.gateway.http_port), timeout=300) as connection:
            connection.sendall(mutated(dice, request) if dice.random() < 0.8 else random_bytes(dice))
            connection.shutdown(socket.SHUT_WR)
            try:
                while connection.recv(1 << 16):
                    pass
            except ConnectionResetError:  # it was told that nobody wants to hear more
                continue
    pipeline.check_alive()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=10 * ROUNDS)
@given(
    fields=st.dictionaries(
        st.sampled_from([*CHAT, *COMPLETION, *RESPONSE, *MESSAGE, "tools", "response_format", "tokens"]),
        json_values,
        max_size=6,
    ),
    reader=st.sampled_from(
        [
            *((parse_chat, CHAT), (parse_completion, COMPLETION)),
            *((parse_tokenize, TOKENIZE), (parse_detokenize, DETOKENIZE)),
            *((partial(parse_response, models=_MODELS), RESPONSE), (partial(parse_message, models=_MODELS), MESSAGE)),
            *((partial(api.parse, models=_MODELS), BODIES[api.paths[-1]]) for api in POOLED_APIS[:2]),
            *((partial(parse_score, models=_MODELS), SCORE), (partial(parse_rerank, models=_MODELS), RERANK)),
        ]
    ),
)
def test_a_body_is_read_or_refused_with_an_error_of_ours(
    fields: dict[str, Any], reader: tuple[Callable[[bytes], object], dict[str, Any]]
) -> None:
    parse, valid = reader
    with suppress(PenstockError):  # anything else is a mistake of ours
        parse(json.dumps({**valid, **fields}).encode())
