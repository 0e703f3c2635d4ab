"""An error that a gRPC call ended with, as its trailer tells it."""

from google.protobuf.message import DecodeError

from contract.domain.errors import ErrorCode, PenstockError
from contract.v1 import common_pb2

ERROR_TRAILER = "penstock-error-bin"  # holds a penstock.v1.Error


def encode_error(error: PenstockError) -> bytes:
    """A penstock.v1.Error."""
    return common_pb2.Error(
        code=common_pb2.ErrorCode.ValueType(error.code),
        message=error.message,
        param=error.param or "",
        retry_after_ms=round(1000 * (error.retry_after_s or 0)),
    ).SerializeToString()


def decode_error(payload: bytes) -> PenstockError | None:
    """The inverse of `encode_error`; None: it is of a version that speaks otherwise."""
    try:
        told = common_pb2.Error.FromString(payload)
        code = ErrorCode(told.code)
    except (ValueError, DecodeError):
        return None
    retry_after_s = told.retry_after_ms / 1000 or None
    return PenstockError(code, told.message, param=told.param or None, retry_after_s=retry_after_s)
