"""HTTP connections within bounds: of bytes before anybody knows who calls, of time, and of how many there are."""

import asyncio
import select
from collections.abc import Callable
from typing import Any, cast

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from contract.domain.errors import ErrorCode, PenstockError
from gateway_svc.core.admission import RETRY_AFTER_S
from gateway_svc.http_limits import HttpLimits
from gateway_svc.http_replies import HttpError, error_response
from gateway_svc.presence import PRESENCE, Presence

LINGER_S = 1.0  # in which a client that is refused may read why; what it sends meanwhile is thrown away
MAX_LINGERING = 64  # connections for which that is done at once
_LINE_BYTES = 4  # of a header beside its name and value: colon, space, end of the line


class BoundedConfig(Config):
    """uvicorn's configuration with our bounds."""

    limits: HttpLimits
    num_lingering = 0  # connections that were refused and may still read why


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 within bounds.

    A parser puts together whatever part of a header it is given, each time anew, so a header without an end costs the
    square of its length: what was fed to it since something came out is counted. So is the time since a head was due.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._bounded = cast(BoundedConfig, config)
        self._limits = self._bounded.limits
        self._timer: asyncio.TimerHandle | None = None
        self._num_fed = 0  # bytes since the parser last gave something complete or a part of a body
        self._num_header_bytes = 0  # of this request, trailers included
        self._num_headers = 0
        self._in_head = self._in_body = False
        self._refusal: PenstockError | None = None  # why a callback ended the parsing
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a head, or says that there are too many connections."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(_too_many(self._limits.max_connections))
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets it."""
        self._stop_waiting()
        if self._is_refused:
            self._bounded.num_lingering -= 1
        super().connection_lost(exc)
        cycle: Any = self.cycle  # None before the first request, whatever its type says
        if cycle is not None and not cycle.response_complete:
            cycle.scope[PRESENCE].leave()

    def data_received(self, data: bytes) -> None:
        """Parses what came, unless the connection was refused."""
        if self._is_refused:
            return
        if not self._in_body:
            self._wait_for_head()
        self._num_fed += len(data)
        super().data_received(data)
        if self._is_refused or self.transport.is_closing():
            return
        if not (self._in_head or self._in_body):  # lines without anything before a request line are passed over
            self._num_fed = 0
        elif self._num_fed > self._limits.max_header_bytes:
            self._refuse(_head_too_large(self._limits))

    def send_400_response(self, msg: str) -> None:
        """Answer as uvicorn does to what is no HTTP, or of what a callback here did not take."""
        self._refuse(self._refusal or HttpError(400, f"{msg} Send HTTP/1.1."))

    def on_message_begin(self) -> None:
        """A request line begins."""
        super().on_message_begin()
        self._num_fed = self._num_header_bytes = self._num_headers = 0
        self._in_head = True
        self._wait_for_head()

    def on_url(self, url: bytes) -> None:
        """A part of the path."""
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        self._num_headers += 1
        self._count(len(name) + len(value) + _LINE_BYTES)
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """From now on a body is waited for."""
        self._in_head, self._in_body = False, True
        self._num_fed = 0
        self._stop_waiting()
        self._wait_for_body()
        cast(dict[str, Any], self.scope)[PRESENCE] = Presence()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of it."""
        self._num_fed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Nothing is waited for while the request is answered."""
        self._in_body = False
        self._num_fed = 0
        self._stop_waiting()
        super().on_message_complete()

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        limits = self._limits
        if self._num_header_bytes > limits.max_header_bytes or self._num_headers > limits.max_headers:
            self._refusal = _head_too_large(limits)
            raise httptools.HttpParserError

    def _wait_for_head(self) -> None:
        """Take bytes; they do not begin the time anew: only a head that is complete ends it."""
        if self._timer is None:
            self._ring_after(self._limits.head_timeout_s, self._on_head_late)

    def _wait_for_body(self) -> None:
        self._ring_after(self._limits.body_timeout_s, self._on_body_late)

    def _ring_after(self, seconds: float, ring: Callable[[], None]) -> None:
        self._timer = self.loop.call_later(seconds, ring)

    def _has_unread(self) -> bool:
        """Return whether something came that is not read yet, as this process was suspended or had others to serve.

        Then its client is not late, and gets its time anew.
        """
        if self.transport.is_closing():
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_head_late(self) -> None:
        self._timer = None
        if self._has_unread() or (self.cycle is not None and not self.cycle.response_complete):
            # The latter: of the request after the one that is being answered, for which this connection stays.
            self._wait_for_head()
        elif self._in_head:
            self._refuse(_late("head", self._limits.head_timeout_s))
        elif not self.transport.is_closing():
            self.transport.close()  # nothing was asked

    def _on_body_late(self) -> None:
        self._timer = None
        if self.pipeline or self._has_unread():  # a body is not read while the request before it is answered
            self._wait_for_body()
        else:
            self._refuse(_late("body", self._limits.body_timeout_s))

    def _refuse(self, error: PenstockError) -> None:
        """Answers with an error, if nothing else is being answered, and takes nothing more from this client."""
        self._stop_waiting()
        self._unset_keepalive_if_required()
        self._is_refused = True
        self._bounded.num_lingering += 1
        self.loop.call_later(LINGER_S, self.transport.abort)
        can_tell = self._can_tell()
        if self._in_body:
            self.cycle.disconnected = True  # who waits for the body hears it
            self.cycle.message_event.set()
        if not can_tell:
            self.transport.close()
            return
        self.transport.write(_reply(error))
        if self._bounded.num_lingering > MAX_LINGERING:
            self.transport.close()
            return
        # To close at once what was not read to its end would make the client lose the answer.
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _can_tell(self) -> bool:
        """Return whether nothing else is being answered, or has been already."""
        cycle: Any = self.cycle  # None before the first request, whatever its type says
        if cycle is None:
            return True
        if self._in_body:
            return not (self.pipeline or cycle.response_started)
        return bool(cycle.response_complete)


def _reply(error: PenstockError) -> bytes:
    response = error_response(error, "")
    lines = [b"HTTP/1.1 %d %s" % (response.status_code, _PHRASES.get(response.status_code, b"Refused"))]
    lines += [name + b": " + value for name, value in (*response.raw_headers, (b"connection", b"close"))]
    return b"\r\n".join([*lines, b"", bytes(response.body)])


_PHRASES = {
    400: b"Bad Request",
    408: b"Request Timeout",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
}


def _head_too_large(limits: HttpLimits) -> PenstockError:
    return HttpError(
        431,
        f"path and headers may have at most {limits.max_header_bytes} bytes in {limits.max_headers} headers; send less",
    )


def _late(what: str, seconds: float) -> PenstockError:
    return HttpError(408, f"the {what} of the request was not complete after {seconds:g} s; send it faster")


def _too_many(number: int) -> PenstockError:
    return PenstockError(
        ErrorCode.OVERLOADED,
        f"this gateway has {number} connections and takes no more; connect again later",
        retry_after_s=RETRY_AFTER_S,
    )
