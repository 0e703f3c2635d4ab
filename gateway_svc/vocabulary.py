"""The pool's vocabulary: tokenizers that live are asked over gRPC, one after the other until one answers."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
import structlog
from grpc import aio

from contract.domain.api_keys import CONTROL_TOKEN_HEADER
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.request import Request
from gateway_svc import wire
from gateway_svc.core.vocabulary import DetokenizeAsk, Prepared, TokenIds, TokenizeAsk, Tokenized
from gateway_svc.large import off_loop
from gateway_svc.outbox import num_bytes, prompt_bytes
from servicekit.bus.calls import SessionInfo, SessionKind
from servicekit.reminder import Reminder
from servicekit.rpc import MAX_MESSAGE_BYTES
from servicekit.status import is_draining
from servicekit.tls_files import TlsFiles
from servicekit.tokens import TokenFile

ATTEMPT_S = 10.0  # for one tokenizer; a prompt as long as the largest body takes a few
LOOK_S = 0.5  # between two looks whether it still lives
AT_ONCE = 32  # questions of one gateway to a pool's tokenizers; others wait
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_logger = structlog.stdlib.get_logger(__name__)


class Vocabulary(Protocol):
    """The questions of a gateway about text and tokens."""

    async def tokenize(self, ask: TokenizeAsk) -> Tokenized:
        """The tokens of a text or a chat.

        Raises:
            PenstockError: INVALID_ARGUMENT: the vocabulary or the chat template refuses it; UNAVAILABLE: nobody
                answers.
        """
        ...

    async def detokenize(self, ask: DetokenizeAsk) -> str:
        """The text of tokens, special ones included.

        Raises:
            PenstockError: INVALID_ARGUMENT: one is beyond the vocabulary; UNAVAILABLE: nobody answers.
        """
        ...

    async def prepare(self, request: Request) -> Prepared:
        """The tokens that a request would have computed, with every check that it would pass.

        Raises:
            PenstockError: as it would end; UNAVAILABLE: nobody answers.
        """
        ...

    async def spell(self, token_ids: TokenIds) -> list[bytes]:
        """The bytes that tokens stand for, each alone.

        Raises:
            PenstockError: UNAVAILABLE: nobody answers.
        """
        ...


@dataclass(frozen=True, slots=True)
class TokenizerAccess:
    """The means by which the tokenizers of a pool let a gateway in."""

    control_token: TokenFile | None = None
    ca: Path | None = None  # PEM, who signs their certificates; None: they have none
    name: str = ""  # that these certificates have; empty: the host of their address
    identity: TlsFiles | None = None  # what is shown to those who ask for it

    def open(self, address: str) -> aio.Channel:
        """A channel to one of them.

        Raises:
            PenstockError: INTERNAL (the operator's fault): a file cannot be read.
        """
        if self.ca is None:
            return aio.insecure_channel(address, options=_OPTIONS)
        try:
            own = () if self.identity is None else (self.identity.key, self.identity.cert)
            credentials = grpc.ssl_channel_credentials(*(path.read_bytes() for path in (self.ca, *own)))
        except OSError as error:
            raise PenstockError(
                ErrorCode.INTERNAL, f"the TLS files for calls of tokenizers cannot be read: {error}"
            ) from error
        options = (*_OPTIONS, ("grpc.ssl_target_name_override", self.name)) if self.name else _OPTIONS
        return aio.secure_channel(address, credentials, options=options)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call.

        Raises:
            PenstockError: INTERNAL (the operator's fault): the control token cannot be read.
        """
        return () if self.control_token is None else ((CONTROL_TOKEN_HEADER, self.control_token.read()),)


class _FellSilentError(Exception):
    """A tokenizer's session has lapsed while it was asked."""


class TokenizerServices:
    """The vocabulary of the tokenizers of one pool. Lives in the gateway's event loop."""

    def __init__(self, sessions: Callable[[], Sequence[SessionInfo]], access: TokenizerAccess) -> None:
        """Nobody is asked yet.

        Args:
            sessions: those of the pool now.
            access: how tokenizers let it in.
        """
        self._sessions = sessions
        self._access = access
        self._channels: dict[str, aio.Channel] = {}  # by address
        self._num_asked = 0  # so that all of them are asked in turn
        self._room = asyncio.Semaphore(AT_ONCE)
        self._reminder = Reminder()

    async def tokenize(self, ask: TokenizeAsk) -> Tokenized:
        """Implement `Vocabulary`."""
        question = await off_loop(prompt_bytes(ask.prompt), wire.tokenize_question, ask, time.time_ns())
        return wire.read_tokenized(await self._ask(question), with_strings=ask.wants_strings)

    async def detokenize(self, ask: DetokenizeAsk) -> str:
        """Implement `Vocabulary`."""
        question = await off_loop(4 * len(ask.token_ids), wire.detokenize_question, ask.token_ids)
        return wire.read_text(await self._ask(question))

    async def prepare(self, request: Request) -> Prepared:
        """Implement `Vocabulary`."""
        question = await off_loop(num_bytes([request]), wire.prepare_question, request)
        return wire.read_prepared(await self._ask(question))

    async def spell(self, token_ids: TokenIds) -> list[bytes]:
        """Implement `Vocabulary`."""
        return wire.read_spelled(await self._ask(wire.spell_question(token_ids)))

    async def close(self) -> None:
        """Ends all connections."""
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(each.close() for each in channels))

    async def _ask(self, question: wire.Question) -> Any:
        async with self._room:
            metadata = self._access.metadata
            why = "none lives"
            for address in await self._addresses():
                try:
                    return await self._answer(address, question(self._channel(address), ATTEMPT_S, metadata))
                except _FellSilentError:
                    why = f"{address}: it lives no more"
                except aio.AioRpcError as error:
                    if (told := wire.tokenizers_error(error)) is not None:
                        raise _for_caller(told) from error
                    why = f"{address}: {error.code().name}"
                    if self._reminder.is_due():
                        _logger.warning("a tokenizer does not answer", address=address, why=error.details())
            raise PenstockError(ErrorCode.UNAVAILABLE, f"no tokenizer of the pool answers ({why}); send it again later")

    async def _answer(self, address: str, call: Awaitable[Any]) -> Any:
        """The answer of one tokenizer, which is waited for while it lives."""
        answer = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({answer}, timeout=LOOK_S))[0]:
                if address not in {each.address for each in self._living()}:
                    raise _FellSilentError
            if answer.cancelled():  # another question has found that it lives no more, and ended its connection
                raise _FellSilentError
            return answer.result()
        finally:
            answer.cancel()

    def _living(self) -> list[SessionInfo]:
        return [each for each in self._sessions() if each.kind is SessionKind.TOKENIZER and each.alive and each.address]

    async def _addresses(self) -> list[str]:
        """Those of living tokenizers that do not leave, another one first each time. Who leaves still answers what it
        was asked; connections to those that live no more are ended.
        """
        living = self._living()
        for address in self._channels.keys() - {each.address for each in living}:
            await self._channels.pop(address).close()
        found = [each.address for each in living if not is_draining(each.status)]
        self._num_asked += 1
        first = self._num_asked % max(1, len(found))
        return found[first:] + found[:first]

    def _channel(self, address: str) -> aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._access.open(address)
        return channel


def _for_caller(error: PenstockError) -> PenstockError:
    """A tokenizer's error as the caller is told it: that the gateway has the wrong token is not the caller's fault."""
    if error.code in (ErrorCode.UNAUTHENTICATED, ErrorCode.PERMISSION_DENIED):
        return PenstockError(
            ErrorCode.INTERNAL, "tokenizers do not let this gateway in: give all services the same --control-token-file"
        )
    return error
