"""Flags that several commands have."""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from contract.domain.api_keys import API_KEY_VARIABLE
from contract.domain.params import SamplingParams
from penstock.client import ClientTls

DEFAULT_ADDRESS = "127.0.0.1:50051"


def add_connection(parser: argparse.ArgumentParser) -> None:
    """The address of the gateway, and who calls."""
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help=f"host:port of a gateway's gRPC [{DEFAULT_ADDRESS}]")
    _add_api_key(parser)

    for name, what in (
        ("ca", "who signed the gateway's certificate"),
        ("cert", "your certificate"),
        ("key", "its key"),
    ):
        parser.add_argument(f"--tls-{name}", metavar="FILE", help=f"PEM file of {what}, for a gateway with TLS [none]")
    parser.add_argument("--tls", action="store_true", help="the gateway has TLS, by an authority that is known here")


def add_http_server(parser: argparse.ArgumentParser) -> None:
    """The address of an HTTP server, and who calls."""
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="of the server, without /v1")
    _add_api_key(parser)


def _add_api_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get(API_KEY_VARIABLE) or None,
        help=f"for a server that asks for one; flags can be seen by others, variables not [none; {API_KEY_VARIABLE}]",
    )


def client_tls(arguments: argparse.Namespace) -> ClientTls | None:
    """TLS as those flags want it; None: not at all."""
    files = ClientTls(arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
    return files if arguments.tls or files != ClientTls() else None


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """The parameters of generation."""
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help=f"tokens at most [{max_tokens}]")
    parser.add_argument("--temperature", type=float, help="0: always the most likely token [as the model's makers say]")
    parser.add_argument("--top-p", type=float, help="share of the probability to draw from [as they say]")
    parser.add_argument("--top-k", type=int, help="most likely tokens to draw from; 0: all [as they say]")
    parser.add_argument("--seed", type=int, help="the same seed gives the same text; none: drawn")
    parser.add_argument("--stop", action="append", default=[], help="text that ends the answer; may be repeated")
    parser.add_argument("--timeout-s", type=float, help="seconds after which the request is given up; none: never")


def sampling_params(arguments: argparse.Namespace) -> dict[str, Any]:
    """The parameters of those flags that were given; the others are the model's defaults.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the one that is out of bounds.
    """
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    SamplingParams(**given)
    return given


def no_arguments(prog: str, description: str | None, argv: Sequence[str]) -> None:
    """For a command that takes none.

    Raises:
        SystemExit: status 2 if there are some; status 0 after `--help`.
    """
    argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False).parse_args(argv)
