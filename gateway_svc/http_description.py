"""The description of the API and a page of it, as the gateway itself tells them."""

from functools import lru_cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from gateway_svc.core.openapi import describe
from gateway_svc.core.replies import encode

ROUTES = (("/openapi.json", "openapi", ["GET"]), ("/docs", "docs", ["GET"]))
# The page has what it needs in itself, but for the description.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


class DescriptionCalls:
    """The handlers."""

    async def openapi(self, _request: Request) -> Response:
        """GET /openapi.json."""
        return Response(_description(), media_type="application/json")

    async def docs(self, _request: Request) -> Response:
        """GET /docs."""
        return Response(_page(), media_type="text/html", headers={"content-security-policy": _POLICY})


@lru_cache(1)
def _description() -> bytes:
    return encode(describe())


@lru_cache(1)
def _page() -> bytes:
    return files("gateway_svc").joinpath("page/docs.html").read_bytes()
