"""A collector of traces: OpenTelemetry's own service, which keeps what it is told of each request."""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

_NUM_THREADS = 4


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on a port of its own until the `with` ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[str, dict[bytes, trace_pb2.Span]] = {}  # by request, which here have no callers' traces
        self._pool = ThreadPoolExecutor(_NUM_THREADS)
        self._server = grpc.server(self._pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
            self, self._server
        )
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> "Collector":
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()
        self._pool.shutdown()

    def Export(self, request: Any, _context: Any) -> Any:  # noqa: N802  (the protocol's name)
        """Takes spans; one that is told twice is one."""
        with self._lock:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self._spans.setdefault(span.trace_id.hex(), {})[span.span_id] = span
        return trace_service_pb2.ExportTraceServiceResponse()

    def wrongs(self, request_ids: Iterable[str]) -> Iterator[str]:
        """Parts that the traces of ended requests lack, one sentence for each."""
        with self._lock:
            traces = {request_id: list(spans.values()) for request_id, spans in self._spans.items()}
        for request_id in request_ids:
            spans = traces.get(request_id, [])
            entries = [span for span in spans if span.kind == trace_pb2.Span.SPAN_KIND_SERVER]
            if len(entries) != 1:
                yield f"{request_id} has {len(entries)} spans of the whole request"
            elif any(span.parent_span_id != entries[0].span_id for span in spans if span is not entries[0]):
                yield f"{request_id} has a span that is no part of it"
            elif missing := {"submit", "detokenize"} - {span.name for span in spans}:
                yield f"{request_id} has no span {', '.join(sorted(missing))}"
