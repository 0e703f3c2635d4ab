"""From a checked call to the requests that are submitted: ids, seeds, times."""

import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace

from contract.domain.errors import ErrorCode, PenstockError, invalid
from contract.domain.model_kind import ModelKind, wrong_kind
from contract.domain.params import AS_FITS, SamplingParams
from contract.domain.pooling import is_done_by
from contract.domain.request import Header, Request
from gateway_svc.core.ask import Ask
from gateway_svc.core.auth import Caller
from gateway_svc.core.idempotency import derive
from gateway_svc.core.models import Catalogue, ListedModel

TIMEOUT_HEADER = "x-request-timeout-s"
RESUMABLE_HEADER = "x-penstock-resumable"
EVENT_IDS_HEADER = "x-penstock-event-ids"
CLIENT_ID_HEADER = "x-request-id"
MAX_CLIENT_ID_CHARS = 255
MAX_TIMEOUT_S = 7 * 86400.0
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_U64 = 2**64


class Intake:
    """Makes the headers of requests; the only place where their randomness comes from."""

    def __init__(self, catalogue: Callable[[], Catalogue], default_timeout_s: float) -> None:
        self._catalogue = catalogue
        self._default_timeout_s = default_timeout_s
        self.takes_priorities: bool | None = None  # whether schedulers serve by priority; None: nobody has said it yet

    def check_priority(self, asked: int) -> None:
        """Makes sure that a priority that was asked for counts.

        Raises:
            PenstockError: INVALID_ARGUMENT: every scheduler serves who came first.
        """
        if asked and self.takes_priorities is False:
            raise invalid(
                f"priority is {asked}, but this pipeline serves who came first: leave it out, or have its operator "
                "set --scheduling-policy priority or fair",
                "priority",
            )

    def requests(
        self,
        ask: Ask,
        caller: Caller,
        *,
        traceparent: str = "",
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> list[Request]:
        """One request for each prompt of a call, all with the same seed. With a key, the same call gives the same
        requests.

        Raises:
            PenstockError: MODEL_NOT_FOUND, or UNAVAILABLE if no model is known yet; INVALID_ARGUMENT: its priority
                does not count, or the model does nothing of the kind.
        """
        self.check_priority(ask.priority)
        model, tenant, params = self._catalogue().find(ask.model), caller.tenant, ask.params
        if model.kind is not None:
            params = _checked(ask, model, model.kind)
        if idempotency_key is None:
            ids = [os.urandom(16) for _ in ask.prompts]
            seed = int.from_bytes(os.urandom(8), "little")
        else:
            ids = [derive(tenant, idempotency_key, index)[0] for index in range(len(ask.prompts))]
            seed = derive(tenant, idempotency_key, 0)[1]
        if params.seed is not None:
            seed = params.seed % _U64
        now_ns = time.time_ns()
        if timeout_s is None:
            timeout_s = self._default_timeout_s or math.inf
        deadline_ns = now_ns + int(timeout_s * 1e9) if timeout_s <= MAX_TIMEOUT_S else 0
        trace = traceparent if _TRACEPARENT.fullmatch(traceparent) else ""
        return [
            Request(
                Header(request_id, tenant, caller.priority(ask.priority), now_ns, deadline_ns, trace, seed),
                model.name,
                prompt,
                params,
                ask.cache_salt,
                ask.unsaid,
                ask.pooling,
            )
            for request_id, prompt in zip(ids, ask.prompts, strict=True)
        ]


def _checked(ask: Ask, model: ListedModel, kind: ModelKind) -> SamplingParams:
    """The parameters of a call; the workers of an encoder say how many tokens of a prompt fit.

    Raises:
        PenstockError: INVALID_ARGUMENT: the model does nothing of the kind.
    """
    if not is_done_by(kind, ask.pooling):
        raise wrong_kind(kind, model.name)
    if not kind.computes_whole_prompts or ask.params.truncate_prompt_tokens != AS_FITS or not model.max_model_len:
        return ask.params
    return replace(ask.params, truncate_prompt_tokens=model.max_model_len)


def parse_timeout(text: str | None) -> float | None:
    """Seconds of the timeout header; None: not given.

    Raises:
        PenstockError: INVALID_ARGUMENT: not a positive number of seconds.
    """
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise invalid(f"{TIMEOUT_HEADER} must be seconds in (0, {MAX_TIMEOUT_S:.0f}], got {text!r:.40}", TIMEOUT_HEADER)
    return seconds


def parse_switch(name: str, text: str | None) -> bool:
    """The value of a header that is true or false; None: not given, which is false.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the header: it is neither.
    """
    if text is None or text.lower() == "false":
        return False
    if text.lower() != "true":
        raise invalid(f"{name} must be true or false, got {text!r:.40}", name)
    return True


def parse_client_id(text: str | None, name: str = CLIENT_ID_HEADER) -> str:
    """The id that a client gives its call in a header or field of this name, told with the reply and logged; empty: it
    gave none.

    Raises:
        PenstockError: INVALID_ARGUMENT naming it: it cannot be told or logged as it is.
    """
    if text is None:
        return ""
    if not 1 <= len(text) <= MAX_CLIENT_ID_CHARS or not all("!" <= character <= "~" for character in text):
        raise invalid(f"{name} must be 1 to {MAX_CLIENT_ID_CHARS} visible ASCII characters", name)
    return text


def too_large_error(max_bytes: int) -> PenstockError:
    """The error for a body beyond the bound, HTTP's or gRPC's."""
    return PenstockError(ErrorCode.REQUEST_TOO_LARGE, f"the body may have at most {max_bytes} bytes; send less at once")
