"""Parameters that a request leaves out are filled in at the edge, by what tokenizers tell of the model."""

import threading
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest
from memory_bus import MemoryBus
from memory_store import Hash
from running_gateway import RunningGateway, eventually
from scripted_pipeline import ScriptedPipeline

from contract.domain.errors import PenstockError
from contract.domain.generation_defaults import OPENAI_DEFAULTS, GenerationDefaults
from contract.domain.params import SamplingParams
from contract.v1 import inference_pb2, inference_pb2_grpc, requests_pb2
from contract.wire.generation_defaults import decode_defaults, encode_defaults
from contract.wire.requests import decode_params
from gateway_svc.service import GatewayService
from gateway_svc.settings import GatewaySettings
from penstock.client import Client
from servicekit.bus.calls import Fetch, Leave

DEFAULTS = GenerationDefaults(
    temperature=0.6,
    top_p=0.95,
    top_k=20,
    min_p=0.05,
    repetition_penalty=1.05,
    max_tokens=30,
    suppress_tokens=(5, 7),
)
OTHERS = GenerationDefaults(temperature=0.1, max_tokens=9)
BODY = {"model": "tiny", "prompt": "x"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
KEY = {"idempotency-key": "order-66"}
Told = Callable[[GenerationDefaults], RunningGateway]


@pytest.fixture
def told(launch: Callable[..., RunningGateway]) -> Told:
    """A gateway that a tokenizer has told these defaults; the second one is of the same pool."""
    running: list[RunningGateway] = []

    def start(defaults: GenerationDefaults) -> RunningGateway:
        if running:
            running[0].pipeline.tell_defaults(defaults)
        gateway = launch(running[0] if running else None, defaults=defaults)
        gateway.pipeline.follows = True
        running.append(gateway)
        return gateway

    return start


def post(gateway: RunningGateway, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    return httpx.post(f"{gateway.url}/v1/{path}", json=body, headers=headers, timeout=300)


def params_of(body: requests_pb2.GenerateRequest) -> SamplingParams:
    """As they are stored, where floats have 32 bits."""
    found = decode_params(body)
    stated = {name: value for name, value in decode_defaults(_as_defaults(body)).stated.items() if value is not None}
    return SamplingParams(**{each: getattr(found, each) for each in found.__dataclass_fields__} | stated)


def _as_defaults(body: requests_pb2.GenerateRequest) -> requests_pb2.GenerationDefaults:
    return requests_pb2.GenerationDefaults(sampling=body.sampling)


def asked(gateway: RunningGateway, path: str, **fields: Any) -> requests_pb2.GenerateRequest:
    """The request that is stored for a call."""
    body = CHAT if path.startswith("chat") else BODY
    reply = post(gateway, path, {**body, **fields})
    assert reply.status_code == 200, reply.text
    return gateway.pipeline.wait_for()[-1].body


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_what_a_request_does_not_say_is_as_the_models_makers_wish(told: Told, path: str) -> None:
    gateway = told(DEFAULTS)
    for fields in ({}, {"temperature": None, "max_tokens": None, "suppress_tokens": None}):
        body = asked(gateway, path, **fields)
        assert params_of(body) == DEFAULTS.params()
        assert body.stopping.max_tokens_is_default


def test_what_a_request_says_holds(told: Told) -> None:
    gateway = told(DEFAULTS)
    said: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 16,
        "suppress_tokens": [],
    }
    body = asked(gateway, "completions", **said)
    assert params_of(body) == SamplingParams()
    assert not body.stopping.max_tokens_is_default
    for name, value in said.items():
        expected = DEFAULTS.params(), SamplingParams(**{name: value})
        found = params_of(asked(gateway, "completions", **{name: value}))
        for field in said.keys() - {"suppress_tokens"}:
            assert getattr(found, field) == getattr(expected[field == name], field), (name, field)
    assert params_of(asked(gateway, "completions", suppress_tokens=[9])).suppress_tokens == (9,)
    body = asked(gateway, "chat/completions", max_completion_tokens=40)
    assert (body.stopping.max_tokens, body.stopping.max_tokens_is_default) == (40, False)


def test_what_contradicts_a_default_is_the_callers_to_say(told: Told) -> None:
    gateway = told(DEFAULTS)
    reply = post(gateway, "completions", BODY | {"min_tokens": 31})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "min_tokens")
    assert asked(gateway, "completions", min_tokens=20).stopping.max_tokens == 30, "16 would be OpenAI's"


def test_without_a_models_defaults_openais_hold(told: Told) -> None:
    gateway = told(OPENAI_DEFAULTS)
    body = asked(gateway, "completions")
    assert (params_of(body), body.stopping.max_tokens_is_default) == (SamplingParams(), True)
    assert not asked(gateway, "chat/completions").stopping.HasField("max_tokens")


def test_over_grpc_what_is_not_set_is_filled_in(told: Told) -> None:
    gateway = told(DEFAULTS)
    with grpc.insecure_channel(gateway.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        bare = requests_pb2.GenerateRequest(text="x")
        list(stub.Generate(inference_pb2.GenerateCall(request=bare)))
        assert params_of(gateway.pipeline.wait_for()[0].body) == DEFAULTS.params()
        some = requests_pb2.GenerateRequest(
            text="x",
            sampling=requests_pb2.SamplingParameters(temperature=0, suppress_token_ids=b""),
            stopping=requests_pb2.StoppingParameters(max_tokens=3),
        )
        list(stub.Generate(inference_pb2.GenerateCall(request=some)))
    found = params_of(gateway.pipeline.wait_for(2)[1].body)
    assert (found.temperature, found.top_k, found.max_tokens, found.suppress_tokens) == (0, 20, 3, ())


def test_the_python_client_gives_all_or_some_or_none(told: Told) -> None:
    gateway = told(DEFAULTS)
    with Client(gateway.grpc) as client:
        for params, expected in (
            (None, DEFAULTS.params()),
            (SamplingParams(), SamplingParams()),
            ({"temperature": 0.5, "seed": 2}, GenerationDefaults(**{**DEFAULTS.stated, "temperature": 0.5}).params()),
        ):
            client.complete("x", params)
            found = params_of(gateway.pipeline.incoming[-1].body)
            assert [getattr(found, each) for each in DEFAULTS.stated] == [
                getattr(expected, each) for each in DEFAULTS.stated
            ]
        with pytest.raises(PenstockError, match="there is no parameter 'temprature'"):
            client.complete("x", {"temprature": 1})


def test_what_holds_is_told_with_the_models(told: Told) -> None:
    gateway = told(DEFAULTS)
    (model,) = httpx.get(f"{gateway.url}/v1/models", timeout=300).json()["data"]
    stated = {**DEFAULTS.stated, "suppress_tokens": [5, 7]}
    assert model["generation_defaults"] == stated
    assert httpx.get(f"{gateway.url}/v1/models/tiny", timeout=300).json() == model


def test_until_a_tokenizer_has_told_them_a_gateway_is_not_ready_and_says_why() -> None:
    bus = MemoryBus()
    pipeline = ScriptedPipeline(bus)
    pipeline.call(Leave(pipeline.tokenizer))
    gateway = RunningGateway(bus, pipeline, GatewayService(GatewaySettings(http_address="127.0.0.1:0"), bus))
    threading.Thread(target=gateway.start).start()
    try:
        eventually(lambda: gateway.service.http_port != 0 and bool(gateway.service.pools.all[0].catalogue.models), 300)
        assert not gateway.service.is_ready()
        reply = post(gateway, "completions", BODY)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert "no tokenizer has said yet what the model's defaults are" in reply.json()["error"]["message"]
        pipeline.tell_defaults(DEFAULTS)
        eventually(gateway.service.is_ready, 300)
        pipeline.call(Leave(pipeline.tokenizer))
        assert asked(gateway, "completions").sampling.top_k == 20, "those of tokenizers that are gone hold"
    finally:
        eventually(gateway.service.is_ready, 300)
        gateway.close()
        pipeline.close()


def test_a_key_compares_what_was_asked_though_defaults_have_changed(told: Told) -> None:
    gateway = told(DEFAULTS)
    first = post(gateway, "completions", BODY, KEY)
    (request,) = gateway.pipeline.wait_for()
    assert request.retire()
    changed = told(OTHERS)
    again = post(changed, "completions", BODY, KEY)
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
    assert again.json()["choices"] == first.json()["choices"]
    assert len(gateway.pipeline.incoming) == 1
    # What is asked for by name is another call, though it be the default of then or now.
    for fields in ({"temperature": 0.6}, {"temperature": 0.1}, {"max_tokens": 30}, {"suppress_tokens": [5, 7]}):
        reply = post(changed, "completions", BODY | fields, KEY)
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "idempotency_conflict")


def test_who_told_a_request_again_tells_it_as_it_was_though_defaults_have_changed(told: Told) -> None:
    gateway = told(DEFAULTS)
    gateway.pipeline.script = lambda request: request.send(request.row("a"))
    store = gateway.bus.server.store
    changed = None
    with httpx.stream(
        "POST", f"{gateway.url}/v1/completions", json=BODY | {"stream": True}, headers=KEY, timeout=300
    ) as heard:
        assert heard.status_code == 200
        (request,) = gateway.pipeline.wait_for()
        changed = told(OTHERS)
        with httpx.stream(
            "POST", f"{changed.url}/v1/completions", json=BODY | {"stream": True}, headers=KEY, timeout=300
        ) as again:
            lines = again.iter_lines()
            assert any('"text":"a"' in line for line in lines)
            before = gateway.pipeline.call(Fetch(request.request_id))
            assert before is not None
            key = gateway.bus.keys.request(request.request_id)
            digest = store.made(key, Hash)[b"digest"]  # as only the server has it
            gateway.bus.stop()
            assert store.delete(key)
            gateway.bus.start()
            eventually(lambda: store.exists(key), 300)
            after = gateway.pipeline.call(Fetch(request.request_id))
            assert after is not None
            assert (after.body, store.made(key, Hash)[b"digest"]) == (before.body, digest)
            assert (after.witness, after.header) == ((b"\x64\x00\x00\x00",), before.header)


def test_defaults_go_over_the_wire_and_back() -> None:
    for defaults in (DEFAULTS, OTHERS, OPENAI_DEFAULTS, GenerationDefaults(temperature=0.0, top_k=0)):
        assert decode_defaults(encode_defaults(defaults)) == defaults
