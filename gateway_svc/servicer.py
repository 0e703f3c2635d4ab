"""`penstock.v1.Inference` over gRPC."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from grpc import aio

from gateway_svc import wire
from gateway_svc.call import Call
from gateway_svc.core.auth import Door
from gateway_svc.core.models import Catalogue
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.stats import GatewayStats, Outcome
from gateway_svc.delivery import Delivery
from gateway_svc.intake import Intake, too_large_error
from gateway_svc.large import off_loop
from gateway_svc.pipeline import PipelineReading
from gateway_svc.reception import Reception
from gateway_svc.sinks import QueueSink
from penstock.domain.api_keys import CONTROL_TOKEN_HEADER
from penstock.domain.errors import PenstockError
from penstock.domain.finish import CancelReason
from penstock.domain.request import Request, format_request_id, parse_request_id
from penstock.v1 import inference_pb2, inference_pb2_grpc, status_pb2
from servicekit.rpc import control_refusal
from servicekit.tokens import TokenFile

Context = aio.ServicerContext[Any, Any]
_logger = structlog.stdlib.get_logger(__name__)


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """The gRPC edge; errors leave through the server's interceptor."""

    def __init__(
        self,
        *,
        delivery: Delivery,
        reception: Reception,
        intake: Intake,
        auth: Door,
        catalogue: Callable[[], Catalogue],
        pipeline: Callable[[], Awaitable[PipelineReading]],
        stats: GatewayStats,
        max_body_bytes: int,
        max_backlog_bytes: int,
        all_resumable: bool,
        control_token: TokenFile | None = None,
    ) -> None:
        self._delivery = delivery
        self._reception = reception
        self._all_resumable = all_resumable
        self._control_token = control_token
        self._intake = intake
        self._auth = auth
        self._catalogue = catalogue
        self._pipeline = pipeline
        self._stats = stats
        self._max_body_bytes = max_body_bytes
        self._max_backlog_bytes = max_backlog_bytes

    # Writes to its context instead of yielding: so a cancelled call ends here at once, and with it the request.
    async def Generate(self, request: inference_pb2.GenerateCall, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Streams what each step adds; a call that breaks or expires cancels the request, unless it is resumable."""
        try:
            checked, form, is_idempotent = await self._check(request, context)
        except PenstockError:
            self._stats.outcomes[Outcome.REJECTED] += 1
            raise
        _logger.debug("request", request_id=format_request_id(form.request_ids[0]), num_requests=1)
        sink = QueueSink(form.n, self._max_backlog_bytes)
        call = await self._reception.open([checked], form, sink, is_idempotent=is_idempotent)
        await self._tell(call, sink, context)

    async def Resume(self, request: inference_pb2.ResumeCall, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Streams what a request has behind what the caller has; from now on the request goes there."""
        caller = self._auth.authenticate(_metadata(context))
        form = await self._reception.form_of(parse_request_id(request.request_id), caller.tenant)
        have = wire.decode_offsets(request, form.num_choices)
        sink = QueueSink(form.n, self._max_backlog_bytes)
        call = await self._reception.resume(form, caller.tenant, sink, have)
        await self._tell(call, sink, context)

    async def Cancel(self, request: inference_pb2.CancelCall, context: Context) -> inference_pb2.CancelReply:  # noqa: N802
        """Ends a request of the caller's tenant."""
        caller = self._auth.authenticate(_metadata(context))
        known = await self._reception.cancel(parse_request_id(request.request_id), caller.tenant)
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
            for model in self._catalogue().models
        ]
        return inference_pb2.ListModelsReply(models=models)

    async def GetPipeline(  # noqa: N802
        self,
        request: inference_pb2.GetPipelineCall,  # noqa: ARG002
        context: Context,
    ) -> status_pb2.PipelineStatus:
        """The state of the whole pipeline: for operators, if there is a control token; else for every caller."""
        metadata = _metadata(context)
        if self._control_token is None:
            self._auth.authenticate(metadata)
        elif not self._control_token.admits(metadata.get(CONTROL_TOKEN_HEADER)):
            raise control_refusal()
        return wire.pipeline_status(await self._pipeline())

    async def _check(self, request: inference_pb2.GenerateCall, context: Context) -> tuple[Request, ReplyForm, bool]:
        """The request of a call, how it is answered, and whether the same may have been asked before."""
        metadata = _metadata(context)
        caller = self._auth.authenticate(metadata)
        self._reception.expect()
        if (num_bytes := request.ByteSize()) > self._max_body_bytes:
            raise too_large_error(self._max_body_bytes)
        ask = await off_loop(num_bytes, wire.decode_generate, request)
        self._intake.check_priority(ask.priority)
        (checked,) = self._intake.requests(
            [ask.prompt],
            ask.params,
            model=ask.model,
            tenant=caller.tenant,
            priority=caller.priority(ask.priority),
            traceparent=metadata.get("traceparent", ""),
            timeout_s=context.time_remaining(),
            idempotency_key=ask.idempotency_key,
            cache_salt=ask.cache_salt,
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
            is_resumable=ask.is_resumable or is_idempotent or self._all_resumable,
        )
        if is_idempotent:
            form = await self._reception.agreed(form, caller.tenant)
        return checked, form, is_idempotent

    async def _tell(self, call: Call, sink: QueueSink, context: Context) -> None:
        """Writes the events of a call until it ends or its client has gone."""
        form = call.form
        sink.refill = lambda: self._delivery.refill(call)
        accepted = inference_pb2.Accepted(
            request_id=format_request_id(form.request_ids[0]), model=form.model, seed=form.seed
        )
        try:
            await context.write(inference_pb2.GenerateEvent(accepted=accepted))
            while rows := await sink.fetch():
                for choice, row in rows:
                    for event in wire.deltas(choice, row):
                        await context.write(event)
        finally:
            is_late = form.deadline_ns and time.time_ns() >= form.deadline_ns
            self._delivery.close(call, CancelReason.DEADLINE if is_late else CancelReason.CLIENT)


def _metadata(context: Context) -> dict[str, str]:
    """What came with a call; several values of one name as the list that they would be in HTTP."""
    found: dict[str, str] = {}
    for key, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            found[key] = f"{found[key]}, {value}" if key in found else value
    return found
