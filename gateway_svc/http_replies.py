"""HTTP replies that are no text of a model: errors and what is asked about."""

import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.generation_defaults import GenerationDefaults
from gateway_svc.core.admission import RETRY_AFTER_S
from gateway_svc.core.apis import errors_at
from gateway_svc.core.models import ListedModel
from gateway_svc.core.replies import encode
from gateway_svc.ignored_fields import MAX_CHARS, MAX_NAMES
from gateway_svc.sinks import Headers, error_headers

IGNORED_FIELDS_HEADER = b"x-penstock-ignored-fields"
_CODES = {404: ErrorCode.NOT_FOUND}


class HttpError(PenstockError):
    """An INVALID_ARGUMENT that has a status of its own in HTTP."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(_CODES.get(status, ErrorCode.INVALID_ARGUMENT), message, param=param)
        self.status = status
        self.headers = headers or {}


def error_response(error: PenstockError, path: str, headers: Headers | None = None) -> Response:
    """An error with its status, and its body as the API at this path has it."""
    response = Response(encode(errors_at(path)(error)), status_code=error.kind.http_status)
    response.raw_headers = [*response.raw_headers, *error_headers(error), *(headers or [])]
    if isinstance(error, HttpError):
        response.status_code = error.status
        response.headers.update(error.headers)
    if error.code is ErrorCode.REQUEST_TOO_LARGE:
        # The rest of the body is not read.
        response.raw_headers.append((b"connection", b"close"))
    return response


async def on_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of our errors."""
    assert isinstance(error, PenstockError)
    return error_response(error, request.url.path)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's handler of its own: no such route, or not by this method; then `Allow` says by which."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(HttpError(error.status_code, message, headers=error.headers), request.url.path)


def json_response(fields: dict[str, Any], status: int = 200) -> Response:
    """A JSON object."""
    return Response(encode(fields), status_code=status, media_type="application/json")


def state_response(fields: dict[str, Any], *, is_good: bool) -> Response:
    """The answer to a probe: 200, or 503 and when to ask again."""
    response = json_response(fields, 200 if is_good else 503)
    if not is_good:
        response.headers["retry-after"] = str(math.ceil(RETRY_AFTER_S))
    return response


def model_fields(model: ListedModel, defaults: GenerationDefaults | None) -> dict[str, Any]:
    """An entry of the list of models; vLLM's clients look for the tokenizer where `root` says.

    `defaults`: what holds where a request does not say otherwise; None: it is not known yet.
    """
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "penstock",
        "root": model.root,
        "max_model_len": model.max_model_len or None,
        "generation_defaults": None if defaults is None else dict(defaults.stated),
    }


def ignored_fields_header(names: Sequence[str]) -> tuple[bytes, bytes]:
    """The fields of a body that nobody knows; whatever a header cannot have is escaped as in URLs."""
    told = ", ".join(quote(name[:MAX_CHARS], safe="!#$&'*+-.^_`|~:/[]{}()@") for name in names[:MAX_NAMES])
    return IGNORED_FIELDS_HEADER, told.encode()
