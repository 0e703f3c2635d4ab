"""Who is let in, for whom requests are served, and what nobody gets to see."""

import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from api_keys import KEY, OTHER_KEY, WRONG_KEY, bearer, line
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from running_gateway import RunningGateway, eventually

from contract.domain.api_keys import hash_api_key
from contract.domain.errors import ErrorCode, PenstockError
from contract.v1 import common_pb2, inference_pb2, inference_pb2_grpc, requests_pb2
from penstock.client import Client

BODY = {"model": "tiny", "prompt": "x"}


Stub = inference_pb2_grpc.InferenceStub


Launch = Callable[..., RunningGateway]


@pytest.fixture
def gateway(launch: Launch, keys_file: Path) -> RunningGateway:
    return launch(api_keys_file=keys_file)


@pytest.fixture
def stub(gateway: RunningGateway) -> Iterator[Stub]:
    with grpc.insecure_channel(gateway.grpc) as channel:
        yield Stub(channel)


# --- HTTP -------------------------------------------------------------------------------------------------------------


def test_the_openai_client_is_let_in_with_its_key(gateway: RunningGateway) -> None:
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key=KEY, max_retries=0, timeout=300) as client:
        assert client.models.list().data[0].id == "tiny"
        assert client.models.retrieve("tiny").id == "tiny"
        messages = [{"role": "user", "content": "hi"}]
        assert client.chat.completions.create(model="tiny", messages=messages).choices[0].finish_reason == "stop"
        assert list(client.completions.create(model="tiny", prompt="hi", stream=True))
    assert [request.header.tenant for request in gateway.pipeline.incoming] == ["one", "one"]


def test_the_openai_client_is_told_that_its_key_is_wrong(gateway: RunningGateway) -> None:
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key=WRONG_KEY, max_retries=0, timeout=300) as client:
        for call in (
            client.models.list,
            lambda: client.models.retrieve("tiny"),
            lambda: client.completions.create(model="tiny", prompt="hi"),
            lambda: client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
            ),
        ):
            with pytest.raises(openai.AuthenticationError, match="not one of this gateway's") as caught:
                call()
            assert (caught.value.code, caught.value.type) == ("unauthenticated", "authentication_error")
            assert caught.value.response.headers["www-authenticate"] == "Bearer"
    assert gateway.pipeline.incoming == []


def test_a_body_is_not_looked_at_without_a_key(gateway: RunningGateway) -> None:
    json_type = {"content-type": "application/json"}
    with httpx.Client(base_url=gateway.url, timeout=300, headers=json_type) as http:
        for path in ("/v1/completions", "/v1/chat/completions"):
            assert http.post(path, content=b"nonsense").status_code == 401
            assert http.post(path, content=b"nonsense", headers=bearer(KEY)).status_code == 400
        assert http.delete("/v1/requests/nonsense").status_code == 401


def test_what_operators_ask_needs_no_key(gateway: RunningGateway) -> None:
    with httpx.Client(base_url=gateway.url, timeout=300) as http:
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert http.get(path).status_code == 200
    with grpc.insecure_channel(gateway.grpc) as channel:
        assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        (told,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked)
    assert "penstock.v1.Inference" in {service.name for service in told.list_services_response.service}


def test_a_priority_below_a_keys_bound_is_raised_to_it(gateway: RunningGateway, stub: Stub) -> None:
    with httpx.Client(base_url=gateway.url, timeout=300) as http:
        for key, priority in ((KEY, -4), (OTHER_KEY, -4), (OTHER_KEY, 8)):
            http.post("/v1/completions", json={**BODY, "priority": priority}, headers=bearer(key)).raise_for_status()
    request = requests_pb2.GenerateRequest(text="x", priority=-4)
    list(stub.Generate(inference_pb2.GenerateCall(request=request), metadata=tuple(bearer(OTHER_KEY).items())))
    headers = [request.header for request in gateway.pipeline.incoming]
    assert [(header.tenant, header.priority) for header in headers] == [
        ("one", -4), ("other", 5), ("other", 8), ("other", 5),
    ]  # fmt: skip


def test_another_tenants_request_is_not_known(gateway: RunningGateway) -> None:
    gateway.pipeline.script = lambda request: None
    with httpx.Client(base_url=gateway.url, timeout=300) as http:
        own = threading.Thread(target=lambda: http.post("/v1/completions", json=BODY, headers=bearer(KEY)))
        own.start()
        (request,) = gateway.pipeline.wait_for()
        path, request_id = f"/v1/requests/{request.request_id.hex()}", request.request_id.hex()
        refused = http.delete(path, headers=bearer(OTHER_KEY))
        missing = http.delete("/v1/requests/" + "00" * 16, headers=bearer(OTHER_KEY))
        assert refused.status_code == missing.status_code == 404
        assert refused.text.replace(request_id, "00" * 16) == missing.text
        with Client(gateway.grpc, api_key=OTHER_KEY, timeout_s=120) as other:
            assert not other.cancel(request_id)
        assert gateway.service.stats.num_streams == 1
        with Client(gateway.grpc, api_key=KEY, timeout_s=120) as same:
            assert same.cancel(request_id)
        assert gateway.pipeline.cancels() == [(request.request_id, 1)]
        request.send(request.row("", [], finish=3))
        own.join(300)
        assert not own.is_alive()


# --- gRPC -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metadata", [(), tuple(bearer(WRONG_KEY).items()), (("authorization", KEY),)])
def test_grpc_without_a_valid_key_is_unauthenticated(stub: Stub, metadata: tuple[tuple[str, str], ...]) -> None:
    request = requests_pb2.GenerateRequest(text="x")
    for call in (
        lambda: list(stub.Generate(inference_pb2.GenerateCall(request=request), metadata=metadata)),
        lambda: stub.Cancel(inference_pb2.CancelCall(request_id="00" * 16), metadata=metadata),
        lambda: stub.ListModels(inference_pb2.ListModelsCall(), metadata=metadata),
        lambda: stub.GetPipeline(inference_pb2.GetPipelineCall(), metadata=metadata),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        error = common_pb2.Error.FromString(dict(caught.value.trailing_metadata())["penstock-error-bin"])
        assert error.code == common_pb2.ERROR_CODE_UNAUTHENTICATED


def test_the_client_sends_its_key_with_every_call(gateway: RunningGateway) -> None:
    with Client(gateway.grpc, api_key=KEY, timeout_s=120) as client:
        assert client.complete("hi").text == "Hello world"
        assert [model.name for model in client.models()] == ["tiny"]
        assert client.pipeline().pool == "penstock"
        assert not client.cancel("00" * 16)
    with (
        Client(gateway.grpc, timeout_s=120) as nobody,
        pytest.raises(PenstockError, match="asks for an API key") as caught,
    ):
        nobody.models()
    assert caught.value.code is ErrorCode.UNAUTHENTICATED


# --- what nobody sees -------------------------------------------------------------------------------------------------


def test_no_log_and_no_reply_has_a_key_or_its_hash(
    log: io.StringIO,
    gateway: RunningGateway,
    keys_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    said = []

    def call_everything() -> None:
        with httpx.Client(base_url=gateway.url, timeout=300) as http:
            for given in (f"{scheme}{key}" for key in (KEY, WRONG_KEY) for scheme in ("Bearer ", "Basic ", "")):
                for body in (b"nonsense", json.dumps(BODY).encode()):
                    # A new connection each time: after an unexpected error the server closes it.
                    headers = {"authorization": given, "connection": "close"}
                    reply = http.post("/v1/completions", content=body, headers=headers)
                    said.append(f"{reply.headers} {reply.text}")
            said.append(http.get("/metrics").text)
        for key in (KEY, WRONG_KEY):
            with Client(gateway.grpc, api_key=key, timeout_s=120) as client:
                for call in (lambda: client.complete("hi"), client.pipeline, lambda: client.cancel("x")):
                    try:
                        said.append(str(call()))
                    except PenstockError as error:
                        said.append(error.message)

    call_everything()
    monkeypatch.setattr(gateway.service.pools.all[0].intake, "requests", lambda *_, **__: 1 // 0)
    call_everything()
    keys_file.write_text(line(KEY, "one", digest=WRONG_KEY))
    eventually(lambda: gateway.service.stats.num_broken_key_reloads == 1)
    gateway.close()
    said += [log.getvalue(), *capfd.readouterr()]
    for expected in (
        "ZeroDivisionError",
        "rpc failed",
        "the API keys from before stay valid",
        '"request"',
        "Hello world",
    ):
        assert any(expected in each for each in said), expected
    for key in (KEY, OTHER_KEY, WRONG_KEY):
        for secret in (key, hash_api_key(key).hex(), str(hash_api_key(key))):
            assert not [each for each in said if secret in each]
