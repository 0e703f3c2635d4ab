"""The Prometheus endpoint: one registry for each service, so that several fit into one process; health over HTTP."""

from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any, Protocol
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.registry import Collector

from penstock.domain.errors import ErrorCode, PenstockError
from servicekit.settings import split_address
from servicekit.tokens import TokenFile


class Vitals(Protocol):
    """How a process is at the moment."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes new work."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether its loops make progress."""
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


def bearer(given: str | None) -> str | None:
    """The token of an Authorization header; None: there is none."""
    scheme, _, token = (given or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


class MetricsEndpoint:
    """Serves `/metrics`, `/health` (alive) and `/ready` from threads of its own; a slow scrape never holds up the
    service. A check that fails answers 503."""

    def __init__(
        self, address: str, registry: CollectorRegistry, vitals: Vitals, token: TokenFile | None = None
    ) -> None:
        """Listens at once; `/metrics` asks for `token`, if there is one.

        Raises:
            PenstockError: INTERNAL (the operator's fault): the address is taken or not one of this host.
        """
        host, port = split_address(address)
        self._server: WSGIServer
        self._thread: Thread
        try:
            self._server, self._thread = start_http_server(port, host or "0.0.0.0", registry=registry)
        except OSError as error:
            raise PenstockError(
                ErrorCode.INTERNAL, f"cannot listen on {address} for metrics ({error}): choose another metrics_address"
            ) from error
        self._server.set_app(_with_health(self._server.get_app(), vitals, token))

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.server_port

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _with_health(
    metrics: Any, vitals: Vitals, token: TokenFile | None
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
