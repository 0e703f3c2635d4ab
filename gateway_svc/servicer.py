"""`penstock.v1.Inference` over gRPC."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog
from grpc import aio

from contract.domain.api_keys import CONTROL_TOKEN_HEADER
from contract.domain.finish import CancelReason
from contract.domain.request import format_request_id
from contract.v1 import inference_pb2, inference_pb2_grpc, status_pb2, tokenizer_pb2
from gateway_svc import wire
from gateway_svc.call import ClientCall, Sink
from gateway_svc.core.auth import Authenticator
from gateway_svc.core.field_names import in_words_of
from gateway_svc.core.pooled.apis import no_stream
from gateway_svc.core.pooled.outcome import PooledOutcome
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.streams import DeliveredSequence
from gateway_svc.core.told import ToldChoice
from gateway_svc.core.vocabulary import DetokenizeAsk, TokenizeAsk
from gateway_svc.grouping import grouped_sink
from gateway_svc.grpc_calls import CheckedCall, GrpcCalls, metadata_of
from gateway_svc.pool import Pool
from gateway_svc.pools import Pools
from gateway_svc.sinks import QueueSink
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
        self._calls = GrpcCalls(pools, auth, max_body_bytes, all_resumable)
        self._control_token = control_token
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
            checked = await self._calls.check(request, context, wire.decode_generate)
            _logger.debug("request", request_id=format_request_id(checked.form.request_ids[0]), num_requests=1)
            sink = QueueSink(checked.form.n, self._max_backlog_bytes, _told(checked.form))
            await self._tell(checked.pool, await _open(checked, grouped_sink(sink, checked.form)), sink, context)

    async def Embed(self, request: inference_pb2.EmbedCall, context: Context) -> inference_pb2.EmbedReply:  # noqa: N802
        """Makes a vector of a prompt; a call that breaks or expires cancels the request, unless it has a key."""
        with self._streaming():
            checked = await self._calls.check(request, context, wire.decode_embed)
            return wire.embed_reply(checked.form, await self._pooled(checked))

    async def Score(self, request: inference_pb2.ScoreCall, context: Context) -> inference_pb2.ScoreReply:  # noqa: N802
        """Tells the likeness of pairs of texts; it ends as `Embed`."""
        with self._streaming():
            checked = await self._calls.check(request, context, wire.decode_score)
            return wire.score_reply(checked.form, await self._pooled(checked), len(request.text_1))

    async def Rerank(self, request: inference_pb2.RerankCall, context: Context) -> inference_pb2.RerankReply:  # noqa: N802
        """Tells documents by their likeness to a text; it ends as `Embed`."""
        with self._streaming():
            checked = await self._calls.check(request, context, wire.decode_rerank)
            return wire.rerank_reply(checked.form, await self._pooled(checked), request.top_n)

    async def Render(self, request: inference_pb2.RenderCall, context: Context) -> inference_pb2.RenderReply:  # noqa: N802
        """The tokens that a chat would have computed."""
        pool, ask, asked = await self._calls.chat(request, context, wire.decode_render)
        with in_words_of(ask.names):
            prepared = await pool.vocabulary.prepare(asked)
        text = await pool.vocabulary.detokenize(DetokenizeAsk(asked.model, tuple(prepared.token_ids.tolist())))
        return wire.render_reply(asked, prepared, text)

    async def Resume(self, request: inference_pb2.ResumeCall, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Streams what a request has after what the caller has; from now on the request goes there."""
        with self._streaming():
            caller = self._calls.caller(context)
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
        caller = self._calls.caller(context)
        pool, request_id = self._pools.of_request(request.request_id)
        known = await pool.reception.cancel(request_id, caller.tenant)
        return inference_pb2.CancelReply(known=known)

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizePromptCall, context: Context
    ) -> tokenizer_pb2.TokenizeReply:
        """The tokens that a text or a chat becomes."""
        pool, ask = await self._calls.vocabulary(request, context, wire.decode_tokenize)
        return wire.tokenize_reply(await pool.vocabulary.tokenize(ask))

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeTokensCall, context: Context
    ) -> tokenizer_pb2.DetokenizeReply:
        """The text of tokens."""
        pool, ask = await self._calls.vocabulary(request, context, wire.decode_detokenize)
        return tokenizer_pb2.DetokenizeReply(text=await pool.vocabulary.detokenize(ask))

    async def ListModels(  # noqa: N802
        self,
        request: inference_pb2.ListModelsCall,  # noqa: ARG002
        context: Context,
    ) -> inference_pb2.ListModelsReply:
        """The models that are served."""
        self._calls.caller(context)
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
        if self._control_token is None:
            self._calls.caller(context)
        elif not self._control_token.admits(metadata_of(context).get(CONTROL_TOKEN_HEADER)):
            raise control_refusal()
        return wire.pipeline_status(await self._pools.called(request.pool).pipeline())

    async def _pooled(self, checked: CheckedCall) -> PooledOutcome:
        """The vectors of a call, once all of its requests have ended."""
        outcome = PooledOutcome(len(checked.requests))
        sink = QueueSink(checked.form.n, self._max_backlog_bytes)
        call = await _open(checked, sink)
        try:
            while rows := await sink.fetch():
                for prompt, output in sink.take_prompts():
                    outcome.learn(prompt, output)
                for prompt, row in rows:
                    outcome.add(prompt, row)
        finally:
            self._close(checked.pool, call)
        return outcome

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


async def _open(checked: CheckedCall, sink: Sink) -> ClientCall:
    """Submits a call, whose text `sink` gets from now on."""
    pool, form = checked.pool, checked.form
    told = pool.told_prompts(sink, None, form=form)
    return await pool.reception.open(
        checked.requests, form, told, is_idempotent=checked.is_idempotent, limits=checked.limits
    )


def _told(form: ReplyForm, have: Sequence[DeliveredSequence] = ()) -> list[ToldChoice]:
    """The choices of a call whose outputs are told apart, as its client has them; none: they are told as they are."""
    places = [each.num_chars for each in have] or [0] * form.num_choices
    told = (form.head.told(choice, place) for choice, place in enumerate(places))
    return [each for each in told if each is not None]
