"""Errors in Anthropic's shape."""

from typing import Any, Final

from contract.domain.errors import PenstockError

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",  # it passes
    504: "timeout_error",
}


def message_error_fields(error: PenstockError) -> dict[str, Any]:
    """The body of an error; its type follows from the status, and the message says which field is wrong."""
    kind = _TYPES.get(error.kind.http_status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
