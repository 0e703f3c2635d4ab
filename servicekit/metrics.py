"""The Prometheus endpoint: one registry for each service, so that several fit into one process."""

from collections.abc import Iterable
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.registry import Collector

from penstock.domain.errors import ErrorCode, PenstockError
from servicekit.settings import split_address


def make_registry(collectors: Iterable[Collector]) -> CollectorRegistry:
    """A registry with a service's collectors and those of its process."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class MetricsEndpoint:
    """Serves `/metrics` from a thread of its own; a slow scrape never holds up the service."""

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        """Listens at once.

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

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.server_port

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
