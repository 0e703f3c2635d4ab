"""The HTTP server: uvicorn within bounds, for the main loop."""

import contextlib
import socket
from collections.abc import Iterator
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from contract.domain.errors import ErrorCode, PenstockError
from gateway_svc.http_limits import HttpLimits
from gateway_svc.http_protocol import BoundedConfig, BoundedProtocol
from servicekit.settings import split_address
from servicekit.tls import TlsIdentity


class HttpServer(uvicorn.Server):
    """Serves an application until `should_exit`."""

    def __init__(self, app: ASGIApp, limits: HttpLimits, tls: TlsIdentity | None = None) -> None:
        """Nothing is listened to yet."""
        config = BoundedConfig(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # below it stands what anybody can write into the log by sending what is no HTTP
            access_log=False,
            server_header=False,
            timeout_keep_alive=cast(int, limits.idle_timeout_s),  # a float does, whatever its type says
        )
        config.limits = limits
        if tls is not None:
            config.load()
            config.ssl = tls.context
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to `servicekit.lifecycle`."""
        yield

    def abort_connections(self) -> None:
        """Lets go of clients that do not read; their handlers see a disconnect."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def listen(address: str) -> socket.socket:
    """A listening socket.

    Raises:
        PenstockError: INTERNAL (the operator's fault): the address is taken or not one of this host.
    """
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise PenstockError(
            ErrorCode.INTERNAL, f"cannot listen on {address} for HTTP ({error}): choose another http_address"
        ) from error
    listener.setblocking(False)
    return listener
