"""Questions about text and tokens go to tokenizers that live, in turn, until one answers."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
from byte_tokenizer import write_byte_model

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.request import Message, Prompt
from gateway_svc import vocabulary
from gateway_svc.core.vocabulary import DetokenizeAsk, TokenizeAsk
from gateway_svc.vocabulary import TokenizerAccess, TokenizerServices
from servicekit.bus.calls import SessionInfo, SessionKind
from servicekit.rpc import RpcServer
from servicekit.status import service_status
from servicekit.tls import open_identity
from servicekit.tls_files import TlsFiles
from servicekit.tokens import TokenFile
from tokenizer_svc.core.tokenize import PromptTokenizer
from tokenizer_svc.loading import load_vocabulary
from tokenizer_svc.servicer import rpc_service

TEXT = TokenizeAsk("", Prompt(text="hi"), add_special_tokens=True, wants_strings=True)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    directory = tmp_path_factory.mktemp("bytes")
    write_byte_model(directory, max_model_len=64, chats=True)
    return PromptTokenizer(load_vocabulary(str(directory)))


def session(address: str, *, alive: bool = True, draining: bool = False, kind: Any = SessionKind.TOKENIZER) -> Any:
    status = service_status(ready=True, draining=draining, started_ns=0, figures={}, hops=[])
    return SessionInfo(address.encode(), kind, address, address, alive, 0, status.SerializeToString())


async def caller_of(listener: socket.socket) -> socket.socket:
    """The connection of the first who calls."""
    listener.setblocking(False)
    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    return connection


def nobody() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def served(
    prompts: PromptTokenizer,
    test: Callable[[str], Awaitable[None]],
    token: TokenFile | None = None,
    tls: TlsFiles | None = None,
) -> None:
    """Runs a test beside a tokenizer's gRPC server."""

    async def run() -> None:
        server = RpcServer([rpc_service(prompts)], token, open_identity(tls))
        try:
            await test(f"127.0.0.1:{await server.start('127.0.0.1:0')}")
        finally:
            await server.stop(0)

    asyncio.run(run())


async def asked(sessions: list[SessionInfo], ask: TokenizeAsk = TEXT, access: Any = None) -> Any:
    services = TokenizerServices(lambda: sessions, access or TokenizerAccess())
    try:
        return await services.tokenize(ask)
    finally:
        await services.close()


def test_texts_chats_and_tokens_are_answered(prompts: PromptTokenizer) -> None:
    async def test(address: str) -> None:
        services = TokenizerServices(lambda: [session(address)], TokenizerAccess())
        found = await services.tokenize(TEXT)
        assert (found.token_ids.tolist(), found.max_model_len) == (
            prompts.encode("hi", add_special_tokens=True).tolist(),
            64,
        )
        assert found.strings == ["h", "i"]
        chat = Prompt(messages=(Message("user", "hi"),))
        told = await services.tokenize(TokenizeAsk("", chat, add_special_tokens=False, wants_strings=False))
        assert told.strings is None
        text = await services.detokenize(DetokenizeAsk("", tuple(told.token_ids.tolist())))
        assert text == "user: hi\nassistant:"
        assert await services.detokenize(DetokenizeAsk("", (256,))) == "<eos>"
        with pytest.raises(PenstockError) as caught:
            await services.detokenize(DetokenizeAsk("", (257,)))
        assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARGUMENT, "token_ids")
        await services.close()

    served(prompts, test)


def test_another_is_tried_where_one_does_not_answer(prompts: PromptTokenizer) -> None:
    async def test(address: str) -> None:
        sessions = [session(nobody()), session(address), session(nobody())]
        services = TokenizerServices(lambda: sessions, TokenizerAccess())
        for _ in range(6):
            assert (await services.tokenize(TEXT)).strings == ["h", "i"]
        await services.close()

    served(prompts, test)


def test_one_that_falls_silent_while_it_is_asked_is_left(
    prompts: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "LOOK_S", 0.01)

    async def test(address: str) -> None:
        # What listens and says nothing is like a process that was stopped.
        with socket.create_server(("127.0.0.1", 0)) as silent:
            other = f"127.0.0.1:{silent.getsockname()[1]}"
            looks = iter([[session(address), session(other)]] * 3)
            services = TokenizerServices(lambda: next(looks, [session(address)]), TokenizerAccess())
            assert (await services.tokenize(TEXT)).strings == ["h", "i"]
            await services.close()

    served(prompts, test)


@pytest.mark.parametrize("how", ["leaves", "is gone"])
def test_a_question_is_answered_though_others_find_that_its_tokenizer_leaves(
    prompts: PromptTokenizer, how: str
) -> None:
    async def test(address: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            other = f"127.0.0.1:{silent.getsockname()[1]}"
            sessions = [session(address), session(other)]
            services = TokenizerServices(lambda: sessions, TokenizerAccess())
            first = asyncio.create_task(services.tokenize(TEXT))
            with await caller_of(silent):
                sessions[1:] = [session(other, draining=True)] if how == "leaves" else []
                assert (await services.tokenize(TEXT)).strings == ["h", "i"]
                sessions[1:] = []
                assert (await first).strings == ["h", "i"]
                await services.close()

    served(prompts, test)


def test_who_gives_a_question_up_ends_it() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            sessions = [session(f"127.0.0.1:{silent.getsockname()[1]}")]
            services = TokenizerServices(lambda: sessions, TokenizerAccess())
            question = asyncio.create_task(services.tokenize(TEXT))
            with await caller_of(silent):
                question.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await question
                await services.close()

    asyncio.run(test())


def test_who_is_gone_or_leaves_or_is_no_tokenizer_is_not_asked(prompts: PromptTokenizer) -> None:
    async def test(address: str) -> None:
        others = [session(address, alive=False), session(address, draining=True), session("")]
        for sessions in ([], [*others, session(address, kind=SessionKind.SCHEDULER)]):
            with pytest.raises(PenstockError) as caught:
                await asked(sessions)
            assert caught.value.code is ErrorCode.UNAVAILABLE
            assert "none lives" in caught.value.message

    served(prompts, test)


def test_nobody_who_answers_is_told_as_such() -> None:
    with pytest.raises(PenstockError) as caught:
        asyncio.run(asked([session(nobody())]))
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert "UNAVAILABLE" in caught.value.message


def test_the_control_token_lets_in_and_a_wrong_one_is_the_operators_fault(
    prompts: PromptTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("0123456789abcdef\n")
    (tmp_path / "wrong").write_text("0123456789abcdeg\n")
    token, wrong = (TokenFile(tmp_path / name, "--flag") for name in ("token", "wrong"))

    async def test(address: str) -> None:
        assert (await asked([session(address)], access=TokenizerAccess(token))).strings == ["h", "i"]
        for access in (TokenizerAccess(), TokenizerAccess(wrong)):
            with pytest.raises(PenstockError) as caught:
                await asked([session(address)], access=access)
            assert caught.value.code is ErrorCode.INTERNAL
            assert "--control-token-file" in caught.value.message

    served(prompts, test, token)


def test_tokenizers_with_tls_are_asked_over_it_with_the_gateways_own_certificate(
    prompts: PromptTokenizer, tmp_path: Path
) -> None:
    authority = trustme.CA()
    signed = authority.issue_cert("tokenizers.example.org")
    files = TlsFiles(tmp_path / "cert", tmp_path / "key", tmp_path / "ca")
    files.cert.write_bytes(b"".join(each.bytes() for each in signed.cert_chain_pems))
    files.key.write_bytes(signed.private_key_pem.bytes())
    (tmp_path / "ca").write_bytes(authority.cert_pem.bytes())

    async def test(address: str) -> None:
        access = TokenizerAccess(None, tmp_path / "ca", "tokenizers.example.org", files)
        assert (await asked([session(address)], access=access)).strings == ["h", "i"]
        for wrong in (TokenizerAccess(), TokenizerAccess(None, tmp_path / "ca", "", files)):
            with pytest.raises(PenstockError) as caught:
                await asked([session(address)], access=wrong)
            assert caught.value.code is ErrorCode.UNAVAILABLE
        with pytest.raises(PenstockError) as caught:
            await asked([session(address)], access=TokenizerAccess(None, tmp_path / "none"))
        assert caught.value.code is ErrorCode.INTERNAL

    served(prompts, test, tls=files)
