"""Settings of a detokenizer."""

from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from servicekit.settings import ServiceSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizerSettings(ServiceSettings):
    """Settings of `detokenizer_svc`."""

    model: str = field(metadata={"help": "checkpoint directory or hub id of the model whose tokenizer is used"})
    revision: str | None = field(default=None, metadata={"help": "branch, tag or commit of a hub id"})
    result_ttl_s: Annotated[float, msgspec.Meta(ge=1, le=7 * 86400)] = field(
        default=600.0, metadata={"help": "seconds for which a finished request's result can be fetched again"}
    )
    compact_entries: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = field(
        default=4096,
        metadata={"help": "entries of a shard's log that live requests may need before it is compacted"},
    )
    compact_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] = field(
        default=8 << 20,
        metadata={"help": "bytes of a shard's log that live requests may need before it is compacted"},
    )
    otlp_traces_endpoint: str = field(
        default="",
        metadata={
            "help": "http://host:port or https://host:port of a collector that takes OpenTelemetry's traces over gRPC; "
            "empty: requests are not traced. Variables of OpenTelemetry (OTEL_EXPORTER_OTLP_HEADERS …) hold"
        },
    )
    otlp_traces_sample_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = field(
        default=1.0,
        metadata={"help": "part of the requests that is traced, of those whose callers' traceparent does not say it"},
    )
    orphan_grace_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = field(
        default=10.0,
        metadata={"help": "seconds after which the requests of a gateway that is gone are cancelled"},
    )
