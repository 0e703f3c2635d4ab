"""Calls over HTTP: their bodies, and one reply each, plain or streamed."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract.domain.errors import PenstockError
from contract.domain.finish import CancelReason
from gateway_svc.call import ClientCall, Sink
from gateway_svc.core.apis import api_of
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.streams import DeliveredSequence
from gateway_svc.delivery import Delivery
from gateway_svc.grouping import grouped_sink
from gateway_svc.http_replies import HttpError, error_response
from gateway_svc.intake import CLIENT_ID_HEADER, parse_client_id, too_large_error
from gateway_svc.presence import PRESENCE
from gateway_svc.prompt_outputs import PromptOutputsSink
from gateway_svc.sinks import Headers, ReplySink, SseSink

REQUEST_ID_HEADER = b"x-penstock-request-id"
_CLIENT_ID_HEADER = CLIENT_ID_HEADER.encode()
_SEND = "penstock.send"  # in a request's scope


@dataclass(frozen=True, slots=True)
class Stream:
    """The form of a streamed reply."""

    have: Sequence[DeliveredSequence]  # what the client has of each choice
    max_backlog_bytes: int
    keep_alive_s: float
    with_ids: bool  # of events


class CallReply:
    """Serves one call. All of its bytes are written by who reads the text stream; here only the client is watched."""

    def __init__(
        self,
        delivery: Delivery,
        form: ReplyForm,
        begin: Callable[[Sink], Awaitable[ClientCall]],
        stream: Stream | None,
        headers: Headers,
        *,
        told: Callable[[Sink, Sequence[DeliveredSequence] | None], Sink],
    ) -> None:
        """A reply that is not begun; without a stream it is a plain one. `told`: see `Pool.told_prompts`."""
        self._delivery = delivery
        self._told = told
        self._form = form
        self._begin = begin
        self._stream = stream
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, as an ASGI application."""
        form, stream, headers = self._form, self._stream, self._headers
        api = api_of(form.form)
        sink: SseSink | ReplySink
        if stream is None:
            reply = api.reply(form.head)
            sink = ReplySink(send, reply, form.n, headers, form.arrival_ns, error_fields=api.error_fields)
        else:
            assert api.events is not None
            events = api.events(form.head, form.request_ids[0], stream.have, with_ids=stream.with_ids)
            most = stream.max_backlog_bytes
            sink = SseSink(scope[_SEND], events, form.n, headers, most, error_fields=api.error_fields)
        try:
            grouped = sink if stream is None else grouped_sink(sink, form)
            told = self._told(grouped, None if stream is None else stream.have)
            call = await scope[PRESENCE].while_there(partial(self._begin, told))
        except PenstockError as error:
            await error_response(error, api.paths[0], headers)(scope, receive, send)
            return
        if call is not None:
            if isinstance(sink, SseSink) and stream is not None:
                sink.refill = partial(self._delivery.refill, call)
                sink.keep_alive(stream.keep_alive_s)
            # Comes when the client has left, and when the reply is complete.
            while (await receive())["type"] != "http.disconnect":
                pass
        if isinstance(sink, SseSink):
            sink.close()
        if isinstance(told, PromptOutputsSink):
            told.close()
        if call is not None:
            self._delivery.close(call, CancelReason.CLIENT)


def direct(app: ASGIApp, posted: Mapping[str, Callable[[Request], Awaitable[ASGIApp]]]) -> ASGIApp:
    """Calls who answers a POST to some paths at once: Starlette's way there takes longer than most of what they do.

    The server's own `send` is kept for event streams: to pass through what Starlette puts around it takes each event
    longer than to be made.
    """

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        scope[_SEND] = send
        answer = posted.get(scope["path"]) if scope.get("method") == "POST" else None
        if answer is None:
            with suppress(ClientDisconnect):  # before its body was complete
                await app(scope, receive, _told(scope, send))
            return
        try:
            reply = await answer(Request(scope, receive))
        except ClientDisconnect:  # before its body was complete; nobody is there to be answered
            return
        except PenstockError as error:
            await error_response(error, scope["path"])(scope, receive, _told(scope, send))
            return
        await reply(scope, receive, send)

    return called


def id_headers(form: ReplyForm, client_id: str) -> Headers:
    """Our id of a call, and its client's if it gave one."""
    ours = form.shown_id.encode()
    told = [(REQUEST_ID_HEADER, ours), (_CLIENT_ID_HEADER, client_id.encode() or ours)]
    id_header = api_of(form.form).id_header
    return [*told, (id_header, ours)] if id_header else told


def _told(scope: Scope, send: Send) -> Send:
    """Tell the id that a client gave its call with the reply."""
    given = next((value for name, value in scope.get("headers", ()) if name == _CLIENT_ID_HEADER), None)
    if given is None:
        return send
    try:
        parse_client_id(given.decode("latin-1"))
    except PenstockError:
        return send

    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (_CLIENT_ID_HEADER, given)]
        await send(message)

    return tell


def nothing(form: ReplyForm) -> list[DeliveredSequence]:
    """The state of each choice at a new client: nothing."""
    return [DeliveredSequence() for _ in range(form.num_choices)]


def check_content_type(headers: Mapping[str, str]) -> None:
    """Makes sure that a body says it is JSON: a browser sends whatever else to any server without asking it first.

    Raises:
        HttpError: 415.
    """
    given = headers.get("content-type", "")
    media_type = given.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        said = f"is {given!r:.80}" if given else "is missing"
        raise HttpError(415, f"Content-Type {said}: send the body as application/json", param="content-type")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        PenstockError: REQUEST_TOO_LARGE, before more than that was read.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise too_large_error(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise too_large_error(max_bytes)
        parts.append(part)
    return b"".join(parts)
