"""Spans to a collector by OTLP over gRPC, with OpenTelemetry's own exporter. Needs the extra `otel`."""

from collections.abc import Sequence

from contract.domain.errors import ErrorCode, PenstockError
from detokenizer_svc.core.spans import Span

try:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
except ImportError as error:
    raise PenstockError(
        ErrorCode.INTERNAL, f"traces need packages that are not installed ({error.name}): pip install 'penstock[otel]'"
    ) from error

_SCOPE = InstrumentationScope("penstock")


class Collector:
    """One collector. What OpenTelemetry's own variables say holds: headers, certificate, resource, time-out."""

    def __init__(self, endpoint: str) -> None:
        """Connects with the first export.

        Args:
            endpoint: http://host:port, or https:// for TLS.
        """
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        # What the variables say goes before it.
        self._resource = Resource.create({"service.name": "penstock"}).merge(OTELResourceDetector().detect())

    def export(self, spans: Sequence[Span]) -> bool:
        """Return whether the collector took them; tried for as long as the exporter's time-out."""
        return self._exporter.export([self._readable(span) for span in spans]) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Nothing is exported any more; one that is under way is given up."""
        self._exporter.shutdown()

    def _readable(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context=_context(span.trace_id, span.span_id),
            parent=_context(span.trace_id, span.parent_id, is_remote=span.is_entry) if span.parent_id else None,
            resource=self._resource,
            attributes=dict(span.attributes),
            events=[Event(each.name, dict(each.attributes), each.at_ns) for each in span.events],
            kind=SpanKind.SERVER if span.is_entry else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=_SCOPE,
        )


def _context(trace_id: bytes, span_id: bytes, *, is_remote: bool = False) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(int.from_bytes(trace_id, "big"), int.from_bytes(span_id, "big"), is_remote, flags)
