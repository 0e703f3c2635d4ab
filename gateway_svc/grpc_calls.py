"""Calls over gRPC: who calls, what is asked, and the requests that it becomes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeVar

from grpc import aio

from contract.domain.errors import PenstockError
from contract.domain.request import Request
from gateway_svc.core.ask import Ask, Models
from gateway_svc.core.auth import Authenticator, Caller, KeyLimits
from gateway_svc.core.idempotency import check_key
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.stats import Outcome
from gateway_svc.core.vocabulary import DetokenizeAsk, TokenizeAsk
from gateway_svc.intake import too_large_error
from gateway_svc.large import off_loop
from gateway_svc.pool import Pool
from gateway_svc.pools import Pools
from gateway_svc.told_prompts import with_prompts

Context: TypeAlias = aio.ServicerContext[Any, Any]


class Message(Protocol):
    """A call as its client sent it."""

    def ByteSize(self) -> int:  # noqa: N802  (protobuf's name)
        """Bytes that it has."""
        ...


class KeyedMessage(Message, Protocol):
    """A call of something that is computed, and may be sent again."""

    @property
    def idempotency_key(self) -> str:
        """The key under which it is the same call; empty: none."""
        ...


M = TypeVar("M", bound=Message)
C = TypeVar("C", bound=KeyedMessage)
A = TypeVar("A", TokenizeAsk, DetokenizeAsk)


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A call that may be submitted."""

    pool: Pool
    requests: Sequence[Request]  # by prompt
    form: ReplyForm
    is_idempotent: bool  # it may have been asked before
    limits: KeyLimits | None  # of its key


@dataclass(frozen=True, slots=True)
class GrpcCalls:
    """Checks calls."""

    pools: Pools
    auth: Authenticator
    max_body_bytes: int
    all_resumable: bool

    def caller(self, context: Context) -> Caller:
        """The caller.

        Raises:
            PenstockError: it is not let in.
        """
        return self.auth.authenticate(metadata_of(context))

    async def check(self, call: C, context: Context, decode: Callable[[C, Models], Ask]) -> CheckedCall:
        """The requests of a call that `decode` reads, and how it is answered.

        Raises:
            PenstockError: it is refused, and counted.
        """
        try:
            return await self._checked(call, context, decode)
        except PenstockError:
            self.pools.stats.outcomes[Outcome.REJECTED] += 1
            raise

    async def chat(self, call: M, context: Context, decode: Callable[[M, Models], Ask]) -> tuple[Pool, Ask, Request]:
        """A chat of which nothing is computed, and the request that it would be.

        Raises:
            PenstockError: it is refused.
        """
        caller = self._let_in(call.ByteSize(), context)
        ask = await off_loop(call.ByteSize(), decode, call, self.pools.routes)
        pool = self.pools.of_model(ask.model)
        (request,) = pool.intake.requests(ask, caller)
        return pool, ask, request

    async def vocabulary(self, call: M, context: Context, decode: Callable[[M], A]) -> tuple[Pool, A]:
        """A call that computes nothing, and the pool whose vocabulary it asks.

        Raises:
            PenstockError: it is refused.
        """
        self._let_in(call.ByteSize(), context)
        ask = await off_loop(call.ByteSize(), decode, call)
        pool = self.pools.of_model(ask.model)
        pool.catalogue.find(ask.model)  # there must be one
        return pool, ask

    async def _checked(self, call: C, context: Context, decode: Callable[[C, Models], Ask]) -> CheckedCall:
        caller = self._let_in(call.ByteSize(), context)
        key = check_key(call.idempotency_key) if call.idempotency_key else None
        ask = await off_loop(call.ByteSize(), decode, call, self.pools.routes)
        pool = self.pools.of_model(ask.model)
        requests = pool.intake.requests(
            ask,
            caller,
            traceparent=metadata_of(context).get("traceparent", ""),
            timeout_s=context.time_remaining(),
            idempotency_key=key,
        )
        form = ReplyForm.of(ask, requests, pool.label)
        if ask.is_resumable or key is not None or self.all_resumable:
            form = replace(form, is_resumable=True)
        if key is not None:
            form = await pool.reception.agreed(form, caller.tenant)
        form = await with_prompts(pool.vocabulary, form, requests, echo=False)
        return CheckedCall(pool, requests, form, key is not None, caller.limits)

    def _let_in(self, num_bytes: int, context: Context) -> Caller:
        caller = self.caller(context)
        self.pools.expect()
        if num_bytes > self.max_body_bytes:
            raise too_large_error(self.max_body_bytes)
        return caller


def metadata_of(context: Context) -> dict[str, str]:
    """The metadata of a call; several values of one name as the list that they would be in HTTP."""
    found: dict[str, str] = {}
    for key, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            found[key] = f"{found[key]}, {value}" if key in found else value
    return found
