"""`penstock.v1.Inference` over gRPC."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import structlog
from grpc import aio

from contract.domain.api_keys import CONTROL_TOKEN_HEADER
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.finish import CancelReason
from contract.domain.request import Request, format_request_id
from contract.domain.rows import TextRow
from contract.v1 import inference_pb2, inference_pb2_grpc, status_pb2, tokenizer_pb2
from gateway_svc import wire
from gateway_svc.call import ClientCall
from gateway_svc.core.auth import Authenticator, KeyLimits
from gateway_svc.core.pooled.apis import no_stream
from gateway_svc.core.pooled.parse import FLOATS
from gateway_svc.core.prompt_outputs import PromptOutput, PromptVector
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.stats import Outcome
from gateway_svc.core.streams import DeliveredSequence
from gateway_svc.core.told import ToldChoice
from gateway_svc.core.vocabulary import DetokenizeAsk, TokenizeAsk
from gateway_svc.grouping import grouped_sink
from gateway_svc.intake import too_large_error
from gateway_svc.large import off_loop
from gateway_svc.pool import Pool
from gateway_svc.pools import Pools
from gateway_svc.sinks import QueueSink
from gateway_svc.told_prompts import with_prompts
from servicekit.rpc import control_refusal
from servicekit.tokens import TokenFile

Context = aio.ServicerContext[Any, Any]
C = TypeVar("C", inference_pb2.GenerateCall, inference_pb2.EmbedCall)
M = TypeVar("M")
V = TypeVar("V", inference_pb2.TokenizePromptCall, inference_pb2.DetokenizeTokensCall)
A = TypeVar("A", TokenizeAsk, DetokenizeAsk)
_logger = structlog.stdlib.get_logger(__name__)


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """The gRPC edge; errors leave through the server's interceptor."""

    def __init__(
        self,
        *,
        pools: Pools,
        auth: Authenticator,
        max_body_bytes: int,
        max_backlog_bytes: int,
        all_resumable: bool,
        control_token: TokenFile | None = None,
    ) -> None:
        self._pools = pools
        self._all_resumable = all_resumable
        self._control_token = control_token
        self._auth = auth
        self._max_body_bytes = max_body_bytes
        self._max_backlog_bytes = max_backlog_bytes
        self._num_streams = 0  # calls that are being told of their requests, or wait to be accepted
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Return when every streaming call has ended: its client has been told all, however long that takes."""
        await self._idle.wait()

    @contextmanager
    def _streaming(self) -> Iterator[None]:
        self._num_streams += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_streams -= 1
            if not self._num_streams:
                self._idle.set()

    # Writes to its context instead of yielding: so a cancelled call ends here at once, and with it the request.
    async def Generate(self, request: inference_pb2.GenerateCall, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Streams what each step adds; a call that breaks or expires cancels the request, unless it is resumable."""
        with self._streaming():
            try:
                pool, checked, form, is_idempotent, limits = await self._check(
                    request, context, wire.decode_generate, self._pools.routes
                )
            except PenstockError:
                self._pools.stats.outcomes[Outcome.REJECTED] += 1
                raise
            _logger.debug("request", request_id=format_request_id(form.request_ids[0]), num_requests=1)
            sink = QueueSink(form.n, self._max_backlog_bytes, _told(form))
            told = pool.told_prompts(grouped_sink(sink, form), None, form=form)
            call = await pool.reception.open([checked], form, told, is_idempotent=is_idempotent, limits=limits)
            await self._tell(pool, call, sink, context)

    async def Embed(self, request: inference_pb2.EmbedCall, context: Context) -> inference_pb2.EmbedReply:  # noqa: N802
        """Makes a vector of a prompt; a call that breaks or expires cancels the request, unless it has a key."""
        with self._streaming():
            try:
                pool, checked, form, is_idempotent, limits = await self._check(
                    request, context, wire.decode_embed, self._pools.routes
                )
            except PenstockError:
                self._pools.stats.outcomes[Outcome.REJECTED] += 1
                raise
            form = replace(form, context=FLOATS)
            sink = QueueSink(form.n, self._max_backlog_bytes)
            told = pool.told_prompts(sink, None, form=form)
            call = await pool.reception.open([checked], form, told, is_idempotent=is_idempotent, limits=limits)
            return await self._vector(pool, call, sink)

    async def Resume(self, request: inference_pb2.ResumeCall, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Streams what a request has after what the caller has; from now on the request goes there."""
        with self._streaming():
            caller = self._auth.authenticate(_metadata(context))
            pool, request_id = self._pools.of_request(request.request_id)
            form = await pool.reception.form_of(request_id, caller.tenant)
            if form.form.is_pooled:
                raise no_stream(form.form)
            have = wire.decode_offsets(request, form.num_choices)
            sink = QueueSink(form.n, self._max_backlog_bytes, _told(form, have))
            told = pool.told_prompts(grouped_sink(sink, form), have, form=form)
            call = await pool.reception.resume(form, caller.tenant, told, have)
            await self._tell(pool, call, sink, context)

    async def Cancel(self, request: inference_pb2.CancelCall, context: Context) -> inference_pb2.CancelReply:  # noqa: N802
        """Ends a request of the caller's tenant."""
        caller = self._auth.authenticate(_metadata(context))
        pool, request_id = self._pools.of_request(request.request_id)
        known = await pool.reception.cancel(request_id, caller.tenant)
        return inference_pb2.CancelReply(known=known)

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizePromptCall, context: Context
    ) -> tokenizer_pb2.TokenizeReply:
        """The tokens that a text or a chat becomes."""
        ask, pool = await self._ask_vocabulary(request, context, wire.decode_tokenize)
        return wire.tokenize_reply(await pool.vocabulary.tokenize(ask))

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeTokensCall, context: Context
    ) -> tokenizer_pb2.DetokenizeReply:
        """The text of tokens."""
        ask, pool = await self._ask_vocabulary(request, context, wire.decode_detokenize)
        return tokenizer_pb2.DetokenizeReply(text=await pool.vocabulary.detokenize(ask))

    async def _ask_vocabulary(self, request: V, context: Context, decode: Callable[[V], A]) -> tuple[A, Pool]:
        """A call that computes nothing, and the pool whose vocabulary it asks."""
        self._auth.authenticate(_metadata(context))
        self._pools.expect()
        if (num_bytes := request.ByteSize()) > self._max_body_bytes:
            raise too_large_error(self._max_body_bytes)
        ask = await off_loop(num_bytes, decode, request)
        pool = self._pools.of_model(ask.model)
        pool.catalogue.find(ask.model)  # there must be one
        return ask, pool

    async def ListModels(  # noqa: N802
        self,
        request: inference_pb2.ListModelsCall,  # noqa: ARG002
        context: Context,
    ) -> inference_pb2.ListModelsReply:
        """The models that are served."""
        self._auth.authenticate(_metadata(context))
        models = [
            inference_pb2.Model(name=model.name, max_model_len=model.max_model_len)
            for model, _ in self._pools.routes.models
        ]
        return inference_pb2.ListModelsReply(models=models)

    async def GetPipeline(  # noqa: N802
        self,
        request: inference_pb2.GetPipelineCall,
        context: Context,
    ) -> status_pb2.PipelineStatus:
        """The state of a whole pool: for operators, if there is a control token; else for every caller."""
        metadata = _metadata(context)
        if self._control_token is None:
            self._auth.authenticate(metadata)
        elif not self._control_token.admits(metadata.get(CONTROL_TOKEN_HEADER)):
            raise control_refusal()
        return wire.pipeline_status(await self._pools.called(request.pool).pipeline())

    async def _check(
        self, request: C, context: Context, decode: Callable[[C, M], wire.GrpcAsk], models: M
    ) -> tuple[Pool, Request, ReplyForm, bool, KeyLimits | None]:
        """Pool and request of a call, how it is answered, whether it may have been asked before, and its limits.

        Args:
            request: the call.
            context: its context.
            decode: reads it.
            models: by which it is read.
        """
        metadata = _metadata(context)
        caller = self._auth.authenticate(metadata)
        self._pools.expect()
        if (num_bytes := request.ByteSize()) > self._max_body_bytes:
            raise too_large_error(self._max_body_bytes)
        ask = await off_loop(num_bytes, decode, request, models)
        pool = self._pools.of_model(ask.model)
        pool.intake.check_priority(ask.priority)
        (checked,) = pool.intake.requests(
            [ask.prompt],
            ask.params,
            model=ask.model,
            tenant=caller.tenant,
            priority=caller.priority(ask.priority),
            traceparent=metadata.get("traceparent", ""),
            timeout_s=context.time_remaining(),
            idempotency_key=ask.idempotency_key,
            cache_salt=ask.cache_salt,
            unsaid=ask.unsaid,
            pooling=ask.pooling,
        )
        header, is_idempotent = checked.header, ask.idempotency_key is not None
        form = ReplyForm(
            request_ids=(header.request_id,),
            n=ask.params.n,
            form=ask.form,
            model=checked.model,
            arrival_ns=header.arrival_ns,
            deadline_ns=header.deadline_ns,
            seed=header.seed,
            wants_logprobs=ask.params.logprobs is not None,
            wants_prompt_logprobs=ask.params.prompt_logprobs is not None,
            is_resumable=ask.is_resumable or is_idempotent or self._all_resumable,
            pool=pool.label,
            stream_interval=ask.stream_interval,
            returns_token_ids=ask.returns_prompt_ids,
            reading=ask.reading,
            names=ask.names,
        )
        if is_idempotent:
            form = await pool.reception.agreed(form, caller.tenant)
        form = await with_prompts(pool.vocabulary, form, [checked], echo=False)
        return pool, checked, form, is_idempotent, caller.limits

    async def _vector(self, pool: Pool, call: ClientCall, sink: QueueSink) -> inference_pb2.EmbedReply:
        """The answer to a call whose prompt becomes a vector."""
        last: TextRow | None = None
        found: list[PromptOutput] = []
        try:
            while rows := await sink.fetch():
                last = rows[-1][1]
                found += [output for _, output in sink.take_prompts()]
        finally:
            self._close(pool, call)
        vector = next((each for each in found if isinstance(each, PromptVector)), None)
        if last is None or vector is None:
            raise PenstockError(ErrorCode.INTERNAL, "the request ended without its vector")
        return wire.embed_reply(call.form, last, vector)

    async def _tell(self, pool: Pool, call: ClientCall, sink: QueueSink, context: Context) -> None:
        """Writes the events of a call until it ends or its client has gone."""
        form = call.form
        sink.refill = lambda: pool.delivery.refill(call)
        try:
            await context.write(wire.accepted_event(form))
            while rows := await sink.fetch():
                for prompt, output in sink.take_prompts():
                    for event in wire.prompt_events(prompt, output):
                        await context.write(event)
                for choice, row in rows:
                    for event in wire.deltas(choice, row, sink.told[choice] if sink.told else None):
                        await context.write(event)
        finally:
            self._close(pool, call)

    @staticmethod
    def _close(pool: Pool, call: ClientCall) -> None:
        """The client has been told all, or is gone."""
        deadline_ns = call.form.deadline_ns
        is_late = deadline_ns and time.time_ns() >= deadline_ns
        pool.delivery.close(call, CancelReason.DEADLINE if is_late else CancelReason.CLIENT)


def _told(form: ReplyForm, have: Sequence[DeliveredSequence] = ()) -> list[ToldChoice]:
    """The choices of a call whose outputs are told apart, as its client has them; none: they are told as they are."""
    places = [each.num_chars for each in have] or [0] * form.num_choices
    told = (form.head.told(choice, place) for choice, place in enumerate(places))
    return [each for each in told if each is not None]


def _metadata(context: Context) -> dict[str, str]:
    """The metadata of a call; several values of one name as the list that they would be in HTTP."""
    found: dict[str, str] = {}
    for key, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            found[key] = f"{found[key]}, {value}" if key in found else value
    return found
