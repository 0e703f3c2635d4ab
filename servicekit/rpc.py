"""The gRPC server of a service: one error interceptor, health and reflection."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import structlog
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from contract.domain.api_keys import CONTROL_TOKEN_HEADER
from contract.domain.errors import ErrorCode, PenstockError, invalid
from contract.wire.errors import ERROR_TRAILER, encode_error
from servicekit.tls import TlsIdentity
from servicekit.tokens import TokenFile

PUSHBACK_TRAILER = "grpc-retry-pushback-ms"  # gRPC clients with a retry policy wait so long by themselves
LIVENESS = "liveness"  # health of this name: the loop makes progress; every other name: takes new work
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_logger = structlog.stdlib.get_logger(__name__)
# Quoted: generic in the stubs only. None: there is no such method.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
_Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]]"


@dataclass(frozen=True, slots=True)
class RpcService:
    """A servicer and how generated code adds it to a server."""

    name: str  # as reflection lists it, e.g. `penstock.v1.Scheduler`
    add: Callable[[Any, aio.Server], None]  # e.g. `scheduler_pb2_grpc.add_SchedulerServicer_to_server`
    servicer: Any
    is_control: bool = True  # for operators: its methods ask for the control token, if there is one


class RpcServer:
    """A grpc.aio server of one service, for the running event loop."""

    def __init__(
        self, services: Iterable[RpcService], control_token: TokenFile | None = None, tls: TlsIdentity | None = None
    ) -> None:
        """Nothing is listened to yet.

        Args:
            services: what is served, beside health and reflection.
            control_token: what control services ask for; None: nothing.
            tls: what is shown to clients, and asked of them; None: nothing is encrypted.
        """
        self._tls = tls
        self._health_server: aio.Server | None = None
        services = list(services)
        guarded = [each.name for each in services if each.is_control] if control_token else []
        self._server = aio.server(
            interceptors=[ErrorInterceptor(guarded, control_token)],
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),  # a second process on the same port is a mistake, not a replica
            ],
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names = []
        for service in services:
            service.add(service.servicer, self._server)
            self._names.append(service.name)
        listed = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(listed, self._server)

    async def start(self, address: str) -> int:
        """Listens on host:port and answers the port.

        Raises:
            PenstockError: INTERNAL (the operator's fault): the address is taken or not one of this host.
        """
        try:
            if self._tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, self._tls.credentials())
        except RuntimeError as error:
            raise PenstockError(
                ErrorCode.INTERNAL, f"cannot listen on {address} for gRPC: choose another grpc_address"
            ) from error
        await self._server.start()
        return port

    async def start_health(self, address: str) -> int:
        """Tells health at another address too, without TLS and with nothing beside it; answers the port.

        Raises:
            PenstockError: INTERNAL (the operator's fault): the address is taken or not one of this host.
        """
        server = self._health_server = aio.server(options=[("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise PenstockError(
                ErrorCode.INTERNAL, f"cannot listen on {address} for gRPC health: choose another grpc_health_address"
            ) from error
        await server.start()
        return port

    async def set_health(self, *, ready: bool, alive: bool) -> None:
        """Set the answer of the health service from now on."""
        for name in ("", *self._names):
            await self._health.set(name, _serving(ready))
        await self._health.set(LIVENESS, _serving(alive))

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls and gives those that run `grace_s` seconds."""
        await self._server.stop(grace_s)
        if self._health_server is not None:
            await self._health_server.stop(0)


def _serving(good: bool) -> Any:
    return health_pb2.HealthCheckResponse.SERVING if good else health_pb2.HealthCheckResponse.NOT_SERVING


class ErrorInterceptor(aio.ServerInterceptor):
    """Ends a call whose handler raised: `PenstockError` with its status and the trailer, anything else as INTERNAL."""

    def __init__(self, guarded: Iterable[str] = (), token: TokenFile | None = None) -> None:
        """Methods of the services `guarded` ask for `token`."""
        self._guarded = frozenset(guarded)
        self._token = token

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler:
        """Wraps the method's handler."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        if self._token is not None and method.split("/")[1] in self._guarded:
            metadata = dict(handler_call_details.invocation_metadata)
            given = metadata.get(CONTROL_TOKEN_HEADER)
            if not (isinstance(given, str) and self._token.admits(given)):
                return grpc.unary_unary_rpc_method_handler(_refusing(method))
        coders = {
            "request_deserializer": _lenient(handler.request_deserializer),
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(_single(handler.unary_unary, method), **coders)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(_stream(handler.unary_stream, method), **coders)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(_single(handler.stream_unary, method), **coders)
        return grpc.stream_stream_rpc_method_handler(_stream(handler.stream_stream, method), **coders)


def control_refusal() -> PenstockError:
    """The error of a caller without the control token, or with a wrong one."""
    return PenstockError(
        ErrorCode.UNAUTHENTICATED,
        f"this is for who has the service's control token: send it as the metadata {CONTROL_TOKEN_HEADER}",
    )


def _refusing(method: str) -> Any:
    async def refuse(_request: bytes, context: aio.ServicerContext[Any, Any]) -> None:
        await _abort(context, control_refusal(), method)

    return refuse


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands for a message that is not one of its method's: what gRPC itself would say of it has no trailer."""

    why: str


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(payload: bytes) -> Any:
        try:
            return deserialize(payload)
        except Exception as error:  # noqa: BLE001  (whatever the generated code finds wrong with it)
            return _Unreadable(str(error))

    return read


def _check(request: Any, method: str) -> None:
    if isinstance(request, _Unreadable):
        raise invalid(f"the message cannot be read as one of {method}: {request.why}")


def _single(behavior: Callable[[Any, Any], Any], method: str) -> Any:
    async def call(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        try:
            _check(request, method)
            reply = behavior(request, context)
            return await reply if inspect.isawaitable(reply) else reply
        except Exception as error:  # noqa: BLE001
            return await _abort(context, error, method)

    return call


def _stream(behavior: Callable[[Any, Any], Any], method: str) -> Any:
    if inspect.isasyncgenfunction(behavior):

        async def generate(request: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                _check(request, method)
                async for message in behavior(request, context):
                    yield message
            except Exception as error:  # noqa: BLE001
                await _abort(context, error, method)

        return generate
    # A coroutine that writes to its context.
    return _single(behavior, method)


async def _abort(context: aio.ServicerContext[Any, Any], error: Exception, method: str) -> None:
    if isinstance(error, aio.AbortError):
        raise error
    if isinstance(error, NotImplementedError):
        error = PenstockError(ErrorCode.UNIMPLEMENTED, f"{method} is not implemented")
    elif not isinstance(error, PenstockError):
        _logger.error("rpc failed", method=method, exc_info=error)
        error = PenstockError(ErrorCode.INTERNAL, f"{method} failed: {type(error).__name__}; see the service's log")
    retry_after_ms = round(1000 * (error.retry_after_s or 0))
    trailers: list[tuple[str, str | bytes]] = [(ERROR_TRAILER, encode_error(error))]
    if retry_after_ms:
        trailers.append((PUSHBACK_TRAILER, str(retry_after_ms)))
    status = grpc.StatusCode[error.kind.grpc_status]
    # The message is also in the status, whose header must stay small.
    await context.abort(status, error.message[:1024], tuple(trailers))
