"""Errors: their codes, who must act, and how each edge says so."""

from dataclasses import dataclass
from enum import Enum, IntEnum


class Fault(Enum):
    """The party that must act for the error to go away."""

    CALLER = "caller"  # the request is wrong: do not send it again as it is
    OPERATOR = "operator"  # the installation is wrong: a person must look
    NOBODY = "nobody"  # it passes: send the request again


class ErrorCode(IntEnum):
    """One code per kind of error; the numbers are those of `penstock.v1.ErrorCode`."""

    UNSPECIFIED = 0
    INVALID_ARGUMENT = 1
    CONTEXT_LENGTH_EXCEEDED = 2
    MODEL_NOT_FOUND = 3
    UNAUTHENTICATED = 4
    NOT_FOUND = 5
    OVERLOADED = 6
    DEADLINE_EXCEEDED = 7
    CANCELLED = 8
    UNAVAILABLE = 9
    INTERNAL = 10
    REQUEST_TOO_LARGE = 11
    IDEMPOTENCY_CONFLICT = 12
    STREAM_DIVERGED = 13
    PERMISSION_DENIED = 14
    UNIMPLEMENTED = 15
    SUPERSEDED = 16
    MODEL_REPLACED = 17
    RATE_LIMIT_EXCEEDED = 18


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """One code at the edges: HTTP status, gRPC status name, OpenAI error type, and who must act."""

    http_status: int
    grpc_status: str
    openai_type: str
    fault: Fault


ERROR_KINDS: dict[ErrorCode, ErrorKind] = {
    ErrorCode.UNSPECIFIED: ErrorKind(500, "UNKNOWN", "server_error", Fault.OPERATOR),
    ErrorCode.INVALID_ARGUMENT: ErrorKind(400, "INVALID_ARGUMENT", "invalid_request_error", Fault.CALLER),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: ErrorKind(400, "INVALID_ARGUMENT", "invalid_request_error", Fault.CALLER),
    ErrorCode.MODEL_NOT_FOUND: ErrorKind(404, "NOT_FOUND", "invalid_request_error", Fault.CALLER),
    ErrorCode.UNAUTHENTICATED: ErrorKind(401, "UNAUTHENTICATED", "authentication_error", Fault.CALLER),
    ErrorCode.NOT_FOUND: ErrorKind(404, "NOT_FOUND", "invalid_request_error", Fault.CALLER),
    ErrorCode.OVERLOADED: ErrorKind(429, "RESOURCE_EXHAUSTED", "rate_limit_error", Fault.NOBODY),
    ErrorCode.DEADLINE_EXCEEDED: ErrorKind(504, "DEADLINE_EXCEEDED", "server_error", Fault.NOBODY),
    ErrorCode.CANCELLED: ErrorKind(499, "CANCELLED", "invalid_request_error", Fault.CALLER),
    ErrorCode.UNAVAILABLE: ErrorKind(503, "UNAVAILABLE", "server_error", Fault.NOBODY),
    ErrorCode.INTERNAL: ErrorKind(500, "INTERNAL", "server_error", Fault.OPERATOR),
    ErrorCode.REQUEST_TOO_LARGE: ErrorKind(413, "INVALID_ARGUMENT", "invalid_request_error", Fault.CALLER),
    ErrorCode.IDEMPOTENCY_CONFLICT: ErrorKind(409, "ALREADY_EXISTS", "invalid_request_error", Fault.CALLER),
    ErrorCode.STREAM_DIVERGED: ErrorKind(500, "DATA_LOSS", "server_error", Fault.NOBODY),
    ErrorCode.PERMISSION_DENIED: ErrorKind(403, "PERMISSION_DENIED", "permission_error", Fault.CALLER),
    ErrorCode.UNIMPLEMENTED: ErrorKind(400, "UNIMPLEMENTED", "invalid_request_error", Fault.CALLER),
    ErrorCode.SUPERSEDED: ErrorKind(409, "ABORTED", "invalid_request_error", Fault.CALLER),
    ErrorCode.MODEL_REPLACED: ErrorKind(503, "UNAVAILABLE", "server_error", Fault.NOBODY),
    ErrorCode.RATE_LIMIT_EXCEEDED: ErrorKind(429, "RESOURCE_EXHAUSTED", "rate_limit_error", Fault.NOBODY),
}


class PenstockError(Exception):
    """An error that a caller or an operator can act on.

    `message` says what is wrong and what to do; `param` names the offending request field, if one is to blame;
    `retry_after_s` is when it is worth sending the request again, where that is known. One that is the caller's fault
    is a `ValueError` too.
    """

    def __new__(cls, code: ErrorCode, *_: object, **__: object) -> "PenstockError":
        """An error that is a `ValueError` where the caller is at fault."""
        is_callers = cls is PenstockError and ERROR_KINDS[code].fault is Fault.CALLER
        return super().__new__(CallersError if is_callers else cls)

    def __init__(
        self, code: ErrorCode, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> ErrorKind:
        """This error at the edges."""
        return ERROR_KINDS[self.code]

    @property
    def fault(self) -> Fault:
        """The party that must act."""
        return self.kind.fault


class CallersError(PenstockError, ValueError):
    """An error whose fault is the caller's; made by `PenstockError` itself."""


def invalid(message: str, param: str | None = None) -> PenstockError:
    """An INVALID_ARGUMENT error: the caller's fault."""
    return PenstockError(ErrorCode.INVALID_ARGUMENT, message, param=param)


def broken(message: str) -> PenstockError:
    """An INTERNAL error: the operator must mend what is installed, which cannot be used as it is."""
    return PenstockError(ErrorCode.INTERNAL, message)


def context_exceeded(context_length: int, why: str, param: str) -> PenstockError:
    """A CONTEXT_LENGTH_EXCEEDED error, in the words by which clients of OpenAI's API tell it from others."""
    message = f"This model's maximum context length is {context_length} tokens; {why}"
    return PenstockError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param=param)


def stream_diverged() -> PenstockError:
    """A STREAM_DIVERGED error: the Redis server lost writes, and nobody remembers what would have come next."""
    return PenstockError(
        ErrorCode.STREAM_DIVERGED,
        "the server lost writes, and what can be continued does not extend what was delivered; send the request anew",
    )


def model_replaced(gone_s: float) -> PenstockError:
    """A MODEL_REPLACED error: the workers that could go on are gone for so many seconds, and others are there."""
    return PenstockError(
        ErrorCode.MODEL_REPLACED,
        f"the model that began this request was replaced, and no worker has had it for {gone_s:g} s; "
        "send the request anew",
    )


def unimplemented(param: str, what: str = "") -> PenstockError:
    """An UNIMPLEMENTED error that names the parameter that is not there yet, or `what` of it is not."""
    return PenstockError(ErrorCode.UNIMPLEMENTED, f"{what or param} is not implemented yet: leave it out", param=param)


class PoisonMessageError(Exception):
    """A message on the bus that cannot be read; its text says why.

    `request_ids` are those that it concerns, as far as is known; None: not even that can be told.
    """

    def __init__(self, why: str, request_ids: list[bytes] | None = None) -> None:
        super().__init__(why)
        self.request_ids = request_ids
