"""The page of a gateway: a chat, and the pool beside it."""

from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from gateway_svc.http_replies import HttpError

ROUTES = (("/", "page", ["GET"]), ("/page/{name}", "part", ["GET"]))
_PARTS = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "chat.js": "text/javascript",
    "elements.js": "text/javascript",
    "gateway.js": "text/javascript",
    "pipeline.js": "text/javascript",
    "timeline.js": "text/javascript",
}
# Everything comes from this server, and nothing in the page is run but its files.
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff", "cache-control": "no-cache"}


class PageCalls:
    """The handlers. What the page asks for needs a key where there are keys; its own files do not."""

    async def page(self, _request: Request) -> Response:
        """GET /: a chat, and the pool beside it."""
        return Response(_file("index.html"), media_type="text/html", headers=_HEADERS)

    async def part(self, request: Request) -> Response:
        """GET /page/{name}: what the page consists of."""
        name = request.path_params["name"]
        if (media_type := _PARTS.get(name)) is None:
            raise HttpError(404, f"the page has no part {name[:80]!r}")
        return Response(_file(name), media_type=media_type, headers=_HEADERS)


@cache
def _file(name: str) -> bytes:
    return files("gateway_svc").joinpath("page", name).read_bytes()
