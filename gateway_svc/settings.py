"""Settings of a gateway."""

import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from gateway_svc.http_limits import HttpLimits
from servicekit.bus.calls import Bounds
from servicekit.settings import ServiceSettings

MOST_CONNECTIONS = 10_000
_OTHER_FILES = 256  # that a gateway has open beside them


def most_connections() -> int:
    """HTTP connections for which there are files enough."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(64, min(MOST_CONNECTIONS, soft - _OTHER_FILES))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(ServiceSettings):
    """Settings of `gateway_svc`."""

    http_address: str = field(
        default="127.0.0.1:8000", metadata={"help": "host:port of the OpenAI HTTP API; port 0 takes a free one"}
    )
    served_model_name: tuple[str, ...] = field(
        default=(),
        metadata={"help": "names that clients may call the model by, separated by commas; empty: as workers register"},
    )
    pools: Path | None = field(
        default=None,
        metadata={
            "help": "file of several model pools that this gateway serves, a JSON line each with name, redis_url and "
            "models, read again when it changes; none: one pool, of --redis-url and --pool"
        },
    )
    api_keys_file: Path | None = field(
        default=None,
        metadata={
            "help": "file of API keys, a JSON line each as `penstock keys new` prints it, read again when it changes; "
            "none: everybody may call"
        },
    )
    api_keys_gone_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = field(
        default=60.0,
        metadata={"help": "seconds for which the keys of a file that is gone stay valid; then nobody may call"},
    )
    trust_tenant_header: bool = field(
        default=False,
        metadata={
            "help": "without API keys, serve a call for the tenant that its header X-Penstock-Tenant names; right only "
            "behind a proxy that knows its callers and sets the header itself"
        },
    )
    max_tenants: Annotated[int, msgspec.Meta(ge=0)] = field(
        default=1000,
        metadata={
            "help": "tenants named by headers for which this gateway serves at once, 429 beyond; twice as many where "
            "clients resume what another gateway has let in; 0: no bound"
        },
    )
    tokenizer_tls_ca: Path | None = field(
        default=None,
        metadata={
            "help": "PEM file of who signs the certificates of the tokenizers that are asked for /tokenize and the "
            "like; this gateway shows them its own; none: their gRPC has no TLS"
        },
    )
    tokenizer_tls_name: str = field(
        default="", metadata={"help": "name that these certificates have; empty: the host of each one's address"}
    )
    cors_origins: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "origins whose web pages may call over HTTP, separated by commas, e.g. https://chat.example.org; "
            "*: all; none: browsers keep pages of other origins away"
        },
    )
    page: bool = field(
        default=True,
        metadata={"help": "serve the page at /: a chat, and the pool drawn beside it; without it / is a 404"},
    )
    strict_fields: bool = field(
        default=False,
        metadata={
            "help": "refuse a body with a field that nobody knows; else its reply names it in the header "
            "x-penstock-ignored-fields and a warning in the log"
        },
    )
    max_header_bytes: Annotated[int, msgspec.Meta(ge=4096, le=1024 * 1024)] = field(
        default=64 * 1024, metadata={"help": "path and headers of an HTTP request, 431 beyond"}
    )
    max_headers: Annotated[int, msgspec.Meta(ge=16, le=10_000)] = field(
        default=128, metadata={"help": "headers of an HTTP request, 431 beyond"}
    )
    head_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = field(
        default=10.0, metadata={"help": "seconds in which path and headers must be there, 408 beyond"}
    )
    body_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = field(
        default=60.0, metadata={"help": "seconds in which the body must be there after them, 408 beyond"}
    )
    idle_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = field(
        default=75.0,
        metadata={
            "help": "seconds for which an HTTP connection without a request is kept; a proxy before the gateway is to "
            "let go of it sooner, as nginx does after 60"
        },
    )
    max_connections: Annotated[int, msgspec.Meta(ge=1)] = field(
        default_factory=most_connections,
        metadata={
            "help": "HTTP connections at once, 429 beyond; by default 10000, if the process may have so many files"
        },
    )
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1024)] = field(
        default=8 * 1024 * 1024, metadata={"help": "largest request body, of HTTP and of gRPC"}
    )
    max_streams: Annotated[int, msgspec.Meta(ge=0)] = field(
        default=0,
        metadata={
            "help": "requests that this gateway serves at once, 429 beyond; twice as many where clients resume what "
            "another gateway has let in; 0: no bound"
        },
    )
    max_waiting_requests: Annotated[int, msgspec.Meta(ge=0)] = field(
        default=10_000,
        metadata={"help": "requests that may wait for their first slot in the whole pool, 429 beyond; 0: no bound"},
    )
    max_waiting_tokens: Annotated[int, msgspec.Meta(ge=0)] = field(
        default=20_000_000, metadata={"help": "tokens that their prompts may have together; 0: no bound"}
    )
    max_waiting_requests_per_tenant: Annotated[int, msgspec.Meta(ge=0)] = field(
        default=1000,
        metadata={
            "help": "requests of one tenant that may wait; 0: no bound; a call without a tenant has only the pool's"
        },
    )
    max_waiting_tokens_per_tenant: Annotated[int, msgspec.Meta(ge=0)] = field(
        default=0, metadata={"help": "tokens of one tenant's prompts that may wait; 0: no bound"}
    )
    default_timeout_s: Annotated[float, msgspec.Meta(ge=0, le=7 * 86400)] = field(
        default=0.0, metadata={"help": "seconds after which a request is given up if its client says nothing; 0: never"}
    )
    tool_format: Literal[
        "auto", "none", "deepseek", "glm", "harmony", "hermes", "llama3_json", "mistral", "pythonic"
    ] = field(
        default="auto",
        metadata={
            "help": "format in which the model calls functions; auto: as its chat template shows; none: `tools` are "
            "refused"
        },
    )
    reasoning_format: Literal["auto", "none", "harmony", "think"] = field(
        default="auto",
        metadata={
            "help": "format in which the model thinks; auto: as its chat template shows; none: its thoughts are content"
        },
    )
    metrics_aliases: Literal["none", "vllm"] = field(
        default="none",
        metadata={
            "help": "vllm: tell what vLLM's metrics tell under their names too, of the whole pool, for tools that read "
            "these"
        },
    )
    resumable: bool = field(
        default=False,
        metadata={"help": "every request outlives its connection for the grace, not only those that ask for it"},
    )
    resume_grace_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = field(
        default=30.0,
        metadata={"help": "seconds for which a resumable request waits for its client before it is cancelled"},
    )
    outage_patience_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = field(
        default=5.0,
        metadata={"help": "seconds for which a new request waits for a Redis server that is away; then it gets a 503"},
    )
    max_backlog_bytes: Annotated[int, msgspec.Meta(ge=1024)] = field(
        default=256 * 1024,
        metadata={"help": "text kept for one slow client; what goes beyond it is fetched again later"},
    )
    sse_keep_alive_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = field(
        default=15.0,
        metadata={
            "help": "seconds of silence after which an event stream gets a comment, so that no proxy cuts it; a stream "
            "without a token so far begins with it, and an error is an event from then on; 0: never"
        },
    )

    @property
    def http_limits(self) -> HttpLimits:
        """The bounds of a connection."""
        return HttpLimits(
            max_header_bytes=self.max_header_bytes,
            max_headers=self.max_headers,
            head_timeout_s=self.head_timeout_s,
            body_timeout_s=self.body_timeout_s,
            idle_timeout_s=self.idle_timeout_s,
            max_connections=self.max_connections,
        )

    @property
    def bounds(self) -> Bounds:
        """The bounds on what waits in the pool."""
        return Bounds(
            requests=self.max_waiting_requests,
            tokens=self.max_waiting_tokens,
            tenant_requests=self.max_waiting_requests_per_tenant,
            tenant_tokens=self.max_waiting_tokens_per_tenant,
        )
