"""The server's edge: errors become statuses with a trailer, health and reflection answer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from contract.domain.api_keys import CONTROL_TOKEN_HEADER
from contract.domain.errors import ErrorCode, PenstockError
from contract.v1 import (
    common_pb2,
    detokenizer_pb2,
    detokenizer_pb2_grpc,
    inference_pb2,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)
from contract.wire.errors import ERROR_TRAILER
from servicekit.rpc import LIVENESS, RpcServer, RpcService
from servicekit.tokens import TokenFile, write_token


class Tokenizer(tokenizer_pb2_grpc.TokenizerServicer):
    async def Tokenize(self, request: Any, context: Any) -> Any:
        if request.text == "wrong":
            raise PenstockError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long: send less", param="text")
        if request.text == "broken":
            raise ZeroDivisionError
        return tokenizer_pb2.TokenizeReply(token_ids=request.text.encode())


class Yielding(detokenizer_pb2_grpc.DetokenizerServicer):
    async def Stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield inference_pb2.Delta(text="a")
        if request.request_id == "wrong":
            raise PenstockError(ErrorCode.NOT_FOUND, "no such request")


class Writing(detokenizer_pb2_grpc.DetokenizerServicer):
    async def Stream(self, request: Any, context: Any) -> None:
        await context.write(inference_pb2.Delta(text="a"))
        if request.request_id == "wrong":
            raise PenstockError(ErrorCode.NOT_FOUND, "no such request")


def served(test: Callable[[RpcServer, aio.Channel], Awaitable[None]], streamer: Any = None) -> None:
    async def run() -> None:
        server = RpcServer(
            [
                RpcService("penstock.v1.Tokenizer", tokenizer_pb2_grpc.add_TokenizerServicer_to_server, Tokenizer()),
                RpcService(
                    "penstock.v1.Detokenizer",
                    detokenizer_pb2_grpc.add_DetokenizerServicer_to_server,
                    streamer or Yielding(),
                ),
            ]
        )
        port = await server.start("127.0.0.1:0")
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await test(server, channel)
        await server.stop(0)

    asyncio.run(run())


def test_a_reply_passes() -> None:
    async def test(_: RpcServer, channel: aio.Channel) -> None:
        reply = await tokenizer_pb2_grpc.TokenizerStub(channel).Tokenize(tokenizer_pb2.TokenizeCall(text="hi"))
        assert reply.token_ids == b"hi"

    served(test)


def told(error: aio.AioRpcError) -> common_pb2.Error:
    return common_pb2.Error.FromString(dict(error.trailing_metadata())[ERROR_TRAILER])


def test_an_error_becomes_a_status_and_a_trailer_that_names_the_field() -> None:
    async def test(_: RpcServer, channel: aio.Channel) -> None:
        with pytest.raises(aio.AioRpcError) as caught:
            await tokenizer_pb2_grpc.TokenizerStub(channel).Tokenize(tokenizer_pb2.TokenizeCall(text="wrong"))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "too long: send less"
        error = told(caught.value)
        assert (error.code, error.param) == (common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, "text")

    served(test)


def test_a_defect_is_internal_and_shows_no_inner_words() -> None:
    async def test(_: RpcServer, channel: aio.Channel) -> None:
        with pytest.raises(aio.AioRpcError) as caught:
            await tokenizer_pb2_grpc.TokenizerStub(channel).Tokenize(tokenizer_pb2.TokenizeCall(text="broken"))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "ZeroDivisionError" in told(caught.value).message

    served(test)


def test_a_method_that_is_not_there_says_so() -> None:
    async def test(_: RpcServer, channel: aio.Channel) -> None:
        with pytest.raises(aio.AioRpcError) as caught:
            await tokenizer_pb2_grpc.TokenizerStub(channel).Detokenize(tokenizer_pb2.DetokenizeCall())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "Detokenize" in told(caught.value).message

    served(test)


both_styles = pytest.mark.parametrize("streamer", [Yielding(), Writing()], ids=["yields", "writes to its context"])


@both_styles
def test_a_stream_passes(streamer: Any) -> None:
    async def test(_: RpcServer, channel: aio.Channel) -> None:
        call = detokenizer_pb2_grpc.DetokenizerStub(channel).Stream(detokenizer_pb2.DetokenizerStreamCall())
        assert [delta.text async for delta in call] == ["a"]
        assert await call.code() is grpc.StatusCode.OK

    served(test, streamer)


@both_styles
def test_a_stream_ends_with_its_error_behind_what_came_before(streamer: Any) -> None:
    async def test(_: RpcServer, channel: aio.Channel) -> None:
        call = detokenizer_pb2_grpc.DetokenizerStub(channel).Stream(
            detokenizer_pb2.DetokenizerStreamCall(request_id="wrong")
        )
        assert (await call.read()).text == "a"
        with pytest.raises(aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert told(caught.value).message == "no such request"

    served(test, streamer)


def test_health_of_the_whole_of_each_service_and_of_the_loop() -> None:
    async def test(server: RpcServer, channel: aio.Channel) -> None:
        stub = health_pb2_grpc.HealthStub(channel)

        async def health(name: str) -> bool:
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

        for ready, alive in ((True, True), (False, True), (False, False)):
            await server.set_health(ready=ready, alive=alive)
            assert await health("") == ready
            assert await health("penstock.v1.Tokenizer") == ready
            assert await health(LIVENESS) == alive

    served(test)


def test_reflection_lists_the_services() -> None:
    async def test(_: RpcServer, channel: aio.Channel) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        reply = await call.read()
        names = {service.name for service in reply.list_services_response.service}
        assert names >= {"penstock.v1.Tokenizer", "penstock.v1.Detokenizer", "grpc.health.v1.Health"}

    served(test)


def test_a_taken_address_is_named() -> None:
    async def test(_: RpcServer, channel: aio.Channel) -> None:
        server, other = RpcServer([]), RpcServer([])
        port = await server.start("127.0.0.1:0")
        with pytest.raises(PenstockError, match=f"127.0.0.1:{port}.*choose another grpc_address"):
            await other.start(f"127.0.0.1:{port}")
        await server.stop(0)
        await other.stop(0)

    served(test)


def test_control_services_ask_for_their_token_and_the_others_do_not(tmp_path: Path) -> None:
    secret = "s3cret-" * 4
    write_token(tmp_path / "token", secret)

    async def run() -> None:
        add_control = tokenizer_pb2_grpc.add_TokenizerServicer_to_server
        add_open = detokenizer_pb2_grpc.add_DetokenizerServicer_to_server
        server = RpcServer(
            [
                RpcService("penstock.v1.Tokenizer", add_control, Tokenizer()),
                RpcService("penstock.v1.Detokenizer", add_open, Yielding(), is_control=False),
            ],
            TokenFile(tmp_path / "token", "--flag"),
        )
        port = await server.start("127.0.0.1:0")
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            tokenize = tokenizer_pb2_grpc.TokenizerStub(channel).Tokenize
            call = tokenizer_pb2.TokenizeCall(text="hi")
            wrong = ((), (("authorization", f"Bearer {secret}"),), ((CONTROL_TOKEN_HEADER, secret[:-1]),))
            for metadata in wrong:
                with pytest.raises(aio.AioRpcError) as caught:
                    await tokenize(call, metadata=metadata)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert told(caught.value).code == ErrorCode.UNAUTHENTICATED
                assert secret not in str(caught.value)
            assert (await tokenize(call, metadata=((CONTROL_TOKEN_HEADER, secret),))).token_ids == b"hi"
            stream = detokenizer_pb2_grpc.DetokenizerStub(channel).Stream(
                detokenizer_pb2.DetokenizerStreamCall(request_id="x")
            )
            assert [message.text async for message in stream] == ["a"]
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        await server.stop(0)

    asyncio.run(run())
