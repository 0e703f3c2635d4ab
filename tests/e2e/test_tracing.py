"""Traces of requests, as a collector gets them by OTLP over gRPC; none is lost with the process that was to tell it."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from served import CALM_LEASES, ENDLESS_TOKENS, SIMULATED, Served, wait_until

from penstock.launcher.ports import free_ports

LIMIT_S = 180
HOPS = {"submit", "tokenize", "queue", "prefill", "decode", "detokenize", "deliver"}


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector: OpenTelemetry's own service, generated from its protocol."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[trace_pb2.Span] = []

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for resource in request.resource_spans:
                (name,) = (
                    each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
                )
                assert name == "penstock"
                for scope in resource.scope_spans:
                    self._spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, request_id: str) -> dict[str, trace_pb2.Span]:
        """The spans of a request by name, whole ones by `request`."""
        with self._lock:
            spans = list(self._spans)
        (trace_id,) = {each.trace_id for each in spans if _told(each).get("gen_ai.response.id") == request_id} or {b""}
        found = [each for each in spans if each.trace_id == trace_id]
        assert len({each.span_id for each in found}) == len(found), "a span came twice"
        return {"request" if each.kind == trace_pb2.Span.SPAN_KIND_SERVER else each.name: each for each in found}

    def wait(self, request_id: str, names: set[str]) -> dict[str, trace_pb2.Span]:
        wait_until(lambda: names <= set(self.of(request_id)), f"spans {sorted(names)} of {request_id}")
        return self.of(request_id)


def _told(span: trace_pb2.Span) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value") for each in span.attributes}


@contextmanager
def receiving(port: int) -> Iterator[Receiver]:
    with ThreadPoolExecutor(4) as pool:
        server, receiver = grpc.server(pool), Receiver()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
        assert server.add_insecure_port(f"127.0.0.1:{port}") == port
        server.start()
        try:
            yield receiver
        finally:
            server.stop(0).wait()


@pytest.fixture(scope="module")
def collector_port() -> int:
    (port,) = free_ports(1)
    return port


@pytest.fixture(scope="module")
def served(collector_port: int, long_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = (f"--otlp-traces-endpoint=http://127.0.0.1:{collector_port}", "--served-model-name=m", "--step-ms=1")
    flags += (f"--model={long_checkpoint}", CALM_LEASES, *SIMULATED)
    with Served(tmp_path_factory.mktemp("traced"), *flags) as served:
        yield served.wait_ready()


def _complete(served: Served, headers: dict[str, str] | None = None, **fields: Any) -> str:
    """A request's id, once its client has all of it."""
    body = {"model": "m", "prompt": "hello", "max_tokens": 20, "ignore_eos": True, **fields}
    with httpx.stream(
        "POST", f"{served.http_url}/v1/completions", json=body, headers=headers, timeout=LIMIT_S
    ) as reply:
        text = b"".join(reply.iter_bytes()).decode()
        assert reply.status_code == 200, text
        return reply.headers["x-penstock-request-id"].removeprefix("cmpl-")


def test_a_streamed_request_has_a_span_for_each_hop_below_its_callers(served: Served, collector_port: int) -> None:
    caller = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    with receiving(collector_port) as receiver:
        request_id = _complete(served, caller, stream=True, temperature=0.5)
        found = receiver.wait(request_id, {"request", *HOPS})
    request = found.pop("request")
    assert request.name == "text_completion m"
    assert (request.trace_id, request.parent_span_id) == (bytes.fromhex("ab" * 16), bytes.fromhex("cd" * 8))
    assert set(found) == HOPS
    assert {each.parent_span_id for each in found.values()} == {request.span_id}
    told = _told(request)
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (5, 20)
    assert told["gen_ai.request.temperature"] == 0.5
    begun = [
        found[name].start_time_unix_nano for name in ("submit", "tokenize", "queue", "prefill", "decode", "deliver")
    ]
    assert begun == sorted(begun)
    assert request.start_time_unix_nano == found["submit"].start_time_unix_nano
    assert _told(found["decode"])["penstock.worker"] == "worker-0"


def test_requests_that_are_refused_or_cancelled_are_told_too(served: Served, collector_port: int) -> None:
    with receiving(collector_port) as receiver:
        refused = httpx.post(
            f"{served.http_url}/v1/completions", json={"model": "m", "prompt": [1, 10**6]}, timeout=LIMIT_S
        )
        assert refused.status_code == 400, refused.text
        refused_id = refused.headers["x-penstock-request-id"].removeprefix("cmpl-")
        body = {"model": "m", "prompt": "x", "max_tokens": ENDLESS_TOKENS, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{served.http_url}/v1/completions", json=body, timeout=LIMIT_S) as reply:
            cancelled_id = reply.headers["x-penstock-request-id"].removeprefix("cmpl-")
            next(line for line in reply.iter_lines() if line.startswith("data: {"))  # not one that keeps it alive
        error = receiver.wait(refused_id, {"request", "submit"})["request"]
        assert error.status.code == trace_pb2.Status.STATUS_CODE_ERROR
        assert _told(error)["error.type"] == "invalid_argument"
        found = receiver.wait(cancelled_id, {"request", "decode"})
        reasons = _told(found["request"])["gen_ai.response.finish_reasons"].values
        assert [each.string_value for each in reasons] == ["cancelled"]
        assert "deliver" not in found, "its client has not had all of it"


def test_a_caller_may_ask_for_no_trace(served: Served, collector_port: int) -> None:
    with receiving(collector_port) as receiver:
        untraced = _complete(served, {"traceparent": f"00-{'ef' * 16}-{'cd' * 8}-00"})
        receiver.wait(_complete(served), {"request", *HOPS})
        assert not receiver.of(untraced)


def test_no_trace_is_lost_with_the_gateway_and_the_detokenizer_that_were_to_tell_it(
    served: Served, collector_port: int
) -> None:
    ids = [_complete(served) for _ in range(8)]
    before = served.pids()
    for victim in ("detokenizer-0", "gateway-0"):
        os.kill(before[victim], signal.SIGKILL)
    wait_until(lambda: served.pids()["detokenizer-0"] != before["detokenizer-0"], "restarted")
    with receiving(collector_port) as receiver:
        for request_id in ids:  # of the last ones the gateway may not have said that they were delivered
            receiver.wait(request_id, {"request", *HOPS} - {"deliver"})
