"""Fields that are not here: refused by name where some engine knows them, told where nobody does."""

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import grpc
import httpx
import pytest
import structlog
from memory_bus import MemoryBus
from running_gateway import RunningGateway, eventually
from scripted_pipeline import TTL_MS

from contract.domain.errors import ErrorCode, PenstockError
from contract.v1 import inference_pb2, inference_pb2_grpc, requests_pb2, status_pb2
from gateway_svc.core.openai import CHAT_FIELDS, COMPLETION_FIELDS, parse_chat, parse_completion
from gateway_svc.core.unsupported import HARMLESS, MISPLACED, NEUTRAL
from gateway_svc.ignored_fields import IgnoredFields
from gateway_svc.wire import takes_priorities
from scheduler_svc.service import SchedulerService
from scheduler_svc.settings import SchedulerSettings
from servicekit.bus.calls import Hello, ListSessions, Renew, SessionKind

BODIES: dict[str, dict[str, Any]] = {
    "completion": {"model": "tiny", "prompt": "x"},
    "chat": {"model": "tiny", "messages": [{"role": "user", "content": "x"}]},
}
PARSERS = {"completion": parse_completion, "chat": parse_chat}
PATHS = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}
FORMS = list(BODIES)
SOMETHING = {"something": ["else"]}


def body(form: str, name: str, value: object) -> bytes:
    fields = dict(BODIES[form])
    outer, _, inner = name.partition(".")
    fields |= {outer: {inner: value}, "stream": True} if inner else {name: value}
    return json.dumps(fields).encode()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_what_is_not_there_is_refused_by_name_unless_it_asks_for_nothing(form: str, name: str) -> None:
    for value in (None, *NEUTRAL[name]):
        assert PARSERS[form](body(form, name, value)).ignored_fields == ()
    with pytest.raises(PenstockError) as caught:
        PARSERS[form](body(form, name, SOMETHING))
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNIMPLEMENTED, name)


@pytest.mark.parametrize("form", FORMS)
def test_what_has_another_name_here_is_told_by_which(form: str) -> None:
    for name, hint in (MISPLACED[""] | MISPLACED[form]).items():
        assert PARSERS[form](body(form, name, None)).ignored_fields == ()
        with pytest.raises(PenstockError) as caught:
            PARSERS[form](body(form, name, SOMETHING))
        assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARGUMENT, name)
        assert hint in caught.value.message


@pytest.mark.parametrize("form", FORMS)
def test_what_changes_nothing_is_taken_whatever_it_says(form: str) -> None:
    for name in HARMLESS:
        assert PARSERS[form](body(form, name, SOMETHING)).ignored_fields == ()


@pytest.mark.parametrize(("form", "known"), [("completion", COMPLETION_FIELDS), ("chat", CHAT_FIELDS)])
def test_a_name_is_in_one_list(form: str, known: frozenset[str]) -> None:
    lists = [set(known), set(NEUTRAL), set(MISPLACED[""]), set(MISPLACED[form]), set(HARMLESS)]
    assert sum(map(len, lists)) == len(set.union(*lists))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("regex", "[a-z]+"),
        ("ebnf", "root ::= 'a'"),
        ("json_schema", "{}"),
        ("structural_tag", "{}"),
        ("enable_thinking", False),
        ("logprob_token_ids", [1]),
        ("vllm_xargs", {"a": 1}),
        ("lora_path", "adapter"),
        ("max_new_tokens", 5),
        ("stop_sequences", ["x"]),
        ("store", True),
        ("service_tier", "flex"),
        ("stream_options.include_obfuscation", True),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_what_other_engines_do_is_not_left_out_in_silence(
    gateway: RunningGateway, form: str, name: str, value: object
) -> None:
    headers = {"content-type": "application/json"}
    reply = httpx.post(gateway.url + PATHS[form], content=body(form, name, value), headers=headers, timeout=300)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
    assert reply.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_name_that_nobody_knows_is_told_in_a_header(gateway: RunningGateway, form: str, stream: bool) -> None:
    asked = BODIES[form] | {"stream": stream, "temprature": 1, "n\r\nö,": 2}
    reply = httpx.post(gateway.url + PATHS[form], json=asked, timeout=300)
    assert reply.status_code == 200
    assert reply.headers["x-penstock-ignored-fields"] == "temprature, n%0D%0A%C3%B6%2C"
    plain = httpx.post(gateway.url + PATHS[form], json=BODIES[form], timeout=300)
    assert "x-penstock-ignored-fields" not in plain.headers


def test_many_long_names_do_not_fill_a_header(gateway: RunningGateway) -> None:
    asked = BODIES["completion"] | {f"{number}{'x' * 1000}": 1 for number in range(1000)}
    told = httpx.post(f"{gateway.url}/v1/completions", json=asked, timeout=300).headers["x-penstock-ignored-fields"]
    assert len(told) < 1500


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("stop_token_id", "stop_token_ids"), ("zzz", None)],
)
def test_where_fields_are_strict_such_a_name_is_refused_with_the_nearest(
    launch: Callable[..., RunningGateway], name: str, nearest: str | None
) -> None:
    gateway = launch(strict_fields=True)
    for form in FORMS:
        reply = httpx.post(gateway.url + PATHS[form], json=BODIES[form] | {name: 1}, timeout=300)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
        message = reply.json()["error"]["message"]
        assert message == f"there is no field {name!r}" + (f": did you mean {nearest!r}?" if nearest else "")
        assert httpx.post(gateway.url + PATHS[form], json=BODIES[form], timeout=300).status_code == 200
    assert (
        httpx.post(
            f"{gateway.url}/v1/completions",
            json=BODIES["completion"] | {"stream": True, "stream_options": {"usage": 1}},
            timeout=300,
        ).json()["error"]["param"]
        == "stream_options.usage"
    )


@pytest.mark.parametrize("takes", [True, False, None])
def test_a_priority_is_refused_where_nobody_serves_by_it(gateway: RunningGateway, takes: bool | None) -> None:
    figures = {} if takes is None else {"takes_priorities": float(takes)}
    status = status_pb2.ServiceStatus(figures=figures).SerializeToString()
    assert gateway.pipeline.call(Renew(gateway.pipeline.sid, TTL_MS, status))
    eventually(lambda: gateway.service.pools.all[0].intake.takes_priorities is takes)
    for form in FORMS:
        for priority, is_refused in ((0, False), (None, False), (-1, takes is False)):
            reply = httpx.post(gateway.url + PATHS[form], json=BODIES[form] | {"priority": priority}, timeout=300)
            assert reply.status_code == (400 if is_refused else 200)
            assert not is_refused or reply.json()["error"]["param"] == "priority"
    call = inference_pb2.GenerateCall(request=requests_pb2.GenerateRequest(text="x", priority=3))
    with grpc.insecure_channel(gateway.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT") if takes is False else nullcontext():
            assert list(stub.Generate(call))


def test_a_scheduler_says_whether_it_serves_by_priority() -> None:
    def takes(policy: Literal["fcfs", "priority", "fair"]) -> bool | None:
        status = SchedulerService(SchedulerSettings(scheduling_policy=policy), MemoryBus()).status().SerializeToString()
        bus = MemoryBus().connect()
        bus.call(Hello(b"s" * 16, SessionKind.SCHEDULER, "s", "", TTL_MS))
        bus.call(Renew(b"s" * 16, TTL_MS, status))
        return takes_priorities(bus.call(ListSessions()))

    assert [takes("fcfs"), takes("priority"), takes("fair")] == [False, True, True]
    assert takes_priorities([]) is None


def test_the_log_tells_at_once_and_then_once_a_minute() -> None:
    class Loop:
        """A clock that is turned by hand."""

        def __init__(self) -> None:
            self.due: list[Callable[[], object]] = []

        def call_later(self, seconds: float, call: Callable[[], object]) -> object:
            assert seconds == 60.0
            self.due.append(call)
            return object()

    loop = Loop()
    with pytest.MonkeyPatch.context() as patch, structlog.testing.capture_logs() as lines:
        patch.setattr(asyncio, "get_running_loop", lambda: loop)
        fields = IgnoredFields()
        for number in range(100):
            fields.note([f"field{number}", "again"])
        assert [(line["log_level"], line["fields"]) for line in lines] == [("warning", ["field0", "again"])]
        loop.due.pop()()
        assert (len(lines), lines[1]["num_bodies"], lines[1]["fields"][:3]) == (2, 99, ["field1", "again", "field2"])
        assert len(lines[1]["fields"]) == 20
        loop.due.pop()()
        assert len(lines) == 2
        assert not loop.due
        fields.note(["later"])
        assert lines[2]["fields"] == ["later"]


@pytest.mark.parametrize("salt", ["", "x" * 256, "é" * 128, 7])
def test_what_is_no_salt_is_refused_by_name(salt: object) -> None:
    with pytest.raises(PenstockError) as caught:
        parse_completion(json.dumps({"prompt": "x", "cache_salt": salt}).encode())
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARGUMENT, "cache_salt")


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"continue_final_message": True, "add_generation_prompt": False},
         {"continue_final_message": True, "add_generation_prompt": False}),
        ({"chat_template": "rag", "chat_template_kwargs": {"x": 1}}, {"chat_template": "rag", "x": 1}),
        ({"add_generation_prompt": True, "chat_template_kwargs": {"add_generation_prompt": True}},
         {"add_generation_prompt": True}),
        ({"add_generation_prompt": None}, None),
    ],
)  # fmt: skip
def test_what_stands_beside_chat_template_kwargs_goes_to_the_template(
    fields: dict[str, Any], given: dict[str, Any] | None
) -> None:
    asked = parse_chat(json.dumps({**BODIES["chat"], **fields}).encode())
    assert asked.prompts[0].chat_template_kwargs == given


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": True, "chat_template_kwargs": {"add_generation_prompt": False}},
         "add_generation_prompt"),
        ({"chat_template": {"a": 1}}, "chat_template"),
    ],
)  # fmt: skip
def test_contradictions_of_what_a_template_is_given_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(PenstockError) as refused:
        parse_chat(json.dumps({**BODIES["chat"], **fields}).encode())
    assert refused.value.param == param
