"""The Prometheus endpoint: one registry for each service, so that several fit into one process; health over HTTP."""

import gzip
import socket
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector

from contract.domain.errors import ErrorCode, PenstockError
from servicekit.settings import split_address
from servicekit.tls import TlsIdentity
from servicekit.tokens import TokenFile

CONNECTION_S = 10.0  # for which a connection may be silent


class ProcessHealth(Protocol):
    """The state of a process at the moment."""

    @property
    def is_ready(self) -> bool:
        """Return whether it takes new work."""
        ...

    @property
    def is_alive(self) -> bool:
        """Return whether its loops make progress."""
        ...


def make_registry(collectors: Iterable[Collector]) -> CollectorRegistry:
    """A registry with a service's collectors and those of its process."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def metrics_page(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """A registry's page in the format that an Accept header prefers, and its content type.

    No name needs escaping, whatever the scraper would have it be: prometheus-client 0.26 would make an underscore of
    the colon of `vllm:` names in OpenMetrics, though not in text.
    """
    encode, content_type = choose_encoder(accept)
    if content_type.startswith("application/openmetrics-text"):
        page: bytes = openmetrics.generate_latest(registry, escaping=ALLOWUTF8)  # type: ignore[no-untyped-call]
        return page, openmetrics.CONTENT_TYPE_LATEST
    return encode(registry), content_type


def bearer(given: str | None) -> str | None:
    """The token of an Authorization header; None: there is none."""
    scheme, _, token = (given or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection; TLS is begun there too, so that one that stays silent holds up nobody."""

    daemon_threads = True
    tls: TlsIdentity | None = None

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves one connection."""
        request.settimeout(CONNECTION_S)
        if self.tls is not None:
            try:
                request = self.tls.context.wrap_socket(request, server_side=True)
            except OSError:  # no TLS, or no certificate that is let in
                self.shutdown_request(request)
                return
        super().process_request_thread(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves, or says nothing, is no defect."""


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: probes come every few seconds."""


class _Endpoint:
    """A WSGI application in threads of its own; a slow client never holds up the service."""

    def __init__(self, address: str, app: Any, what: str, tls: TlsIdentity | None = None) -> None:
        """Listens at once.

        Raises:
            PenstockError: INTERNAL (the operator's fault): the address is taken or not one of this host.
        """
        host, port = split_address(address)
        kind = _IPv6Server if ":" in host else _Server
        try:
            self._server = make_server(host or "0.0.0.0", port, app, kind, handler_class=_SilentHandler)
        except OSError as error:
            raise PenstockError(
                ErrorCode.INTERNAL, f"cannot listen on {address} for {what} ({error}): choose another {what}_address"
            ) from error
        self._server.tls = tls
        self._thread = Thread(target=self._server.serve_forever, name=what, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.server_port

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class MetricsEndpoint(_Endpoint):
    """Serves `/metrics`, `/health` (alive) and `/ready`. A check that fails answers 503."""

    def __init__(
        self,
        address: str,
        registry: CollectorRegistry,
        vitals: ProcessHealth,
        token: TokenFile | None = None,
        tls: TlsIdentity | None = None,
    ) -> None:
        """An endpoint whose `/metrics` asks for `token`, if there is one."""
        super().__init__(address, _with_health(_page_app(registry), vitals, token), "metrics", tls)


class HealthEndpoint(_Endpoint):
    """Serves `/health` and `/ready`, and nothing else: for probes that have neither key nor certificate."""

    def __init__(self, address: str, vitals: ProcessHealth) -> None:
        """See `_Endpoint`."""
        super().__init__(address, _with_health(_nothing, vitals, None), "health")


def _page_app(registry: CollectorRegistry) -> Callable[[dict[str, Any], Any], Iterable[bytes]]:
    """The WSGI application that answers with the page, compressed for those who ask for that."""

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        page, content_type = metrics_page(registry, environ.get("HTTP_ACCEPT", ""))
        headers = [("Content-Type", content_type)]
        if gzip_accepted(environ.get("HTTP_ACCEPT_ENCODING", "")):
            page = gzip.compress(page)
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", [*headers, ("Content-Length", str(len(page)))])
        return [page]

    return app


def _nothing(_environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    start_response("404 Not Found", [("Content-Length", "0")])
    return []


def _with_health(
    metrics: Any, vitals: ProcessHealth, token: TokenFile | None
) -> Callable[[dict[str, Any], Any], Iterable[bytes]]:
    """The WSGI application in front of the one that knows the metrics."""

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        checks = {"/health": vitals.is_alive, "/ready": vitals.is_ready}
        is_good = checks.get(environ["PATH_INFO"])
        if is_good is None:
            if token is not None and not token.admits(bearer(environ.get("HTTP_AUTHORIZATION"))):
                start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Length", "0")])
                return []
            answer: Iterable[bytes] = metrics(environ, start_response)
            return answer
        status = "200 OK" if is_good else "503 Service Unavailable"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{status[4:].lower()}\n".encode()]

    return app
