"""Flags that say who answers."""

import argparse
from collections.abc import Sequence

import httpx

from contract.domain.api_keys import API_KEY_VARIABLE
from penstock.cli.arguments import add_connection

OPENAI_KEY_VARIABLE = "OPENAI_API_KEY"
_OPENAI_NOTE = f"""With --base-url any server with OpenAI's API is called over HTTP: /v1/models where no --model is
given, and /v1/chat/completions or /v1/completions. The key is then --api-key or {OPENAI_KEY_VARIABLE}, never
{API_KEY_VARIABLE}, and OPENAI_BASE_URL is not read: without --base-url a Penstock is called. Sampling flags are sent by
OpenAI's names; --top-k too, if it is given, which not every server knows. --timeout-s gives up an answer that lasts
longer, or a silence as long. An answer that breaks off is not resumed, even by a Penstock: --address does that."""


def add_server(parser: argparse.ArgumentParser) -> None:
    """A gateway over gRPC, or any server with OpenAI's API over HTTP; `parse_server` reads them."""
    add_connection(parser)
    # None: not given. Which default holds depends on the way.
    parser.set_defaults(address=None, api_key=None)
    parser.add_argument(
        "--base-url",
        type=_api_url,
        metavar="URL",
        help="call this server by OpenAI's HTTP API instead; /v1 is added where the URL has no path [none]",
    )
    parser.add_argument("--model", default="", metavar="NAME", help="of the models there [the first]")
    parser.epilog = _OPENAI_NOTE


def parse_server(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command with `add_server`.

    Raises:
        SystemExit: status 2 if a flag is wrong, or has no meaning over HTTP beside --base-url.
    """
    arguments = parser.parse_args(argv)
    if arguments.base_url is None:
        return arguments
    if arguments.address is not None:
        parser.error("--address is for gRPC and --base-url for HTTP: give one of them")
    if arguments.tls:
        parser.error("--tls is for gRPC: beside --base-url, a URL that begins with https:// says it")
    if arguments.tls_key is not None and arguments.tls_cert is None:
        parser.error("--tls-key without --tls-cert: give both")
    return arguments


def _api_url(text: str) -> str:
    """The URL of an API, as OpenAI's clients take it, or of its host alone."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host or url.query or url.fragment:
        raise argparse.ArgumentTypeError(f"{text!r} is no URL like http://127.0.0.1:8000/v1")
    return str(url.copy_with(path=url.path.rstrip("/") or "/v1"))
