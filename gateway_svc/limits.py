"""API keys with limits: for how much a call counts, and what is said to one that is too much."""

import math
from collections.abc import Sequence
from dataclasses import replace

from contract.domain.errors import ErrorCode, PenstockError, invalid
from contract.domain.request import Request
from gateway_svc.core.admission import RETRY_AFTER_S
from gateway_svc.core.auth import KeyLimits
from servicekit.bus.calls import Limit, Metered, OverLimit, Submit


def metered(calls: Sequence[Submit], requests: Sequence[Request], limits: KeyLimits) -> list[Submit]:
    """The submits of one call, which count for a key: for their prompts, and what they may generate if that is known.

    Raises:
        PenstockError: INVALID_ARGUMENT: they are more than the key may ever have at once.
    """
    if 0 < limits.max_running < len(calls):
        raise invalid(
            f"the call has {len(calls)} prompts, and the API key {limits.label!r} may have {limits.max_running} "
            "requests at once (max_running): send fewer prompts at once",
            "prompt",
        )
    tokens = [
        call.num_tokens + request.params.n * (request.params.max_tokens or 0)
        for call, request in zip(calls, requests, strict=True)
    ]
    of_call = Metered(
        limits.key,
        calls[0].request_id,
        limits.rpm,
        limits.tpm,
        limits.max_running,
        call_tokens=sum(tokens),
        call_requests=len(calls),
    )
    return [replace(call, metered=replace(of_call, tokens=each)) for call, each in zip(calls, tokens, strict=True)]


def over_limit(refused: OverLimit, limits: KeyLimits) -> PenstockError:
    """The error of a call that is more than its key may use."""
    seconds = refused.wait_ms / 1000
    match refused.limit:
        case Limit.CALLS:
            what = f"rpm {limits.rpm} (calls in a minute)"
        case Limit.TOKENS:
            what = f"tpm {limits.tpm} (tokens of prompts and outputs in a minute)"
        case Limit.RUNNING:
            what = f"max_running {limits.max_running} (requests at once)"
    again = "when one of them has ended" if refused.limit is Limit.RUNNING else f"in {math.ceil(seconds)} s"
    return PenstockError(
        ErrorCode.RATE_LIMIT_EXCEEDED,
        f"Rate limit reached: the API key {limits.label!r} has {what}; send the call again {again}",
        retry_after_s=max(seconds, RETRY_AFTER_S),
    )
