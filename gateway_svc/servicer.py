"""`penstock.v1.Inference` over gRPC."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from grpc import aio

from contract.domain.api_keys import CONTROL_TOKEN_HEADER
from contract.domain.errors import PenstockError
from contract.domain.finish import CancelReason
from contract.domain.request import Request, format_request_id
from contract.v1 import inference_pb2, inference_pb2_grpc, status_pb2
from gateway_svc import wire
from gateway_svc.call import ClientCall
from gateway_svc.core.auth import Authenticator, KeyLimits
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.stats import Outcome
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
                pool, checked, form, is_idempotent, limits = await self._check(request, context)
            except PenstockError:
                self._pools.stats.outcomes[Outcome.REJECTED] += 1
                raise
            _logger.debug("request", request_id=format_request_id(form.request_ids[0]), num_requests=1)
            sink = QueueSink(form.n, self._max_backlog_bytes)
            told = pool.told_prompts(grouped_sink(sink, form), None, form=form)
            call = await pool.reception.open([checked], form, told, is_idempotent=is_idempotent, limits=limits)
            await self._tell(pool, call, sink, context)

    async def Resume(self, request: inference_pb2.ResumeCall, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Streams what a request has after what the caller has; from now on the request goes there."""
        with self._streaming():
            caller = self._auth.authenticate(_metadata(context))
            pool, request_id = self._pools.of_request(request.request_id)
            form = await pool.reception.form_of(request_id, caller.tenant)
            have = wire.decode_offsets(request, form.num_choices)
            sink = QueueSink(form.n, self._max_backlog_bytes)
            told = pool.told_prompts(grouped_sink(sink, form), have, form=form)
            call = await pool.reception.resume(form, caller.tenant, told, have)
            await self._tell(pool, call, sink, context)

    async def Cancel(self, request: inference_pb2.CancelCall, context: Context) -> inference_pb2.CancelReply:  # noqa: N802
        """Ends a request of the caller's tenant."""
        caller = self._auth.authenticate(_metadata(context))
        pool, request_id = self._pools.of_request(request.request_id)
        known = await pool.reception.cancel(request_id, caller.tenant)
        return inference_pb2.CancelReply(known=known)

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
        self, request: inference_pb2.GenerateCall, context: Context
    ) -> tuple[Pool, Request, ReplyForm, bool, KeyLimits | None]:
        """Pool and request of a call, how it is answered, whether it may have been asked before, and its limits."""
        metadata = _metadata(context)
        caller = self._auth.authenticate(metadata)
        self._pools.expect()
        if (num_bytes := request.ByteSize()) > self._max_body_bytes:
            raise too_large_error(self._max_body_bytes)
        ask = await off_loop(num_bytes, wire.decode_generate, request, self._pools.routes.defaults)
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
        )
        if is_idempotent:
            form = await pool.reception.agreed(form, caller.tenant)
        form = await with_prompts(pool.vocabulary, form, [checked], echo=False)
        return pool, checked, form, is_idempotent, caller.limits

    async def _tell(self, pool: Pool, call: ClientCall, sink: QueueSink, context: Context) -> None:
        """Writes the events of a call until it ends or its client has gone."""
        form = call.form
        sink.refill = lambda: pool.delivery.refill(call)
        try:
            await context.write(wire.accepted_event(form))
            while rows := await sink.fetch():
                for prompt, logprobs in sink.take_prompts():
                    for event in wire.prompt_events(prompt, logprobs):
                        await context.write(event)
                for choice, row in rows:
                    for event in wire.deltas(choice, row):
                        await context.write(event)
        finally:
            is_late = form.deadline_ns and time.time_ns() >= form.deadline_ns
            pool.delivery.close(call, CancelReason.DEADLINE if is_late else CancelReason.CLIENT)


def _metadata(context: Context) -> dict[str, str]:
    """The metadata of a call; several values of one name as the list that they would be in HTTP."""
    found: dict[str, str] = {}
    for key, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            found[key] = f"{found[key]}, {value}" if key in found else value
    return found
