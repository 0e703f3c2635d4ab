"""Answers for `penstock chat` and `complete`: of a Penstock gateway, or of any server with OpenAI's API."""

import argparse
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from contract.domain.api_keys import API_KEY_VARIABLE
from contract.domain.errors import invalid
from penstock.cli.answers.flags import OPENAI_KEY_VARIABLE, add_server, parse_server
from penstock.cli.answers.gateway import Gateway
from penstock.cli.answers.openai_server import OpenAIServer
from penstock.cli.answers.piece import Answers, Piece
from penstock.cli.arguments import DEFAULT_ADDRESS, client_tls, sampling_params
from penstock.client import Client

__all__ = ["Answers", "Piece", "add_server", "open_answers", "parse_server"]

_CONNECT_TIMEOUT_S = 10.0


@contextmanager
def open_answers(arguments: argparse.Namespace) -> Iterator[Answers]:
    """The server that the flags of `add_server` name, generating as those of `add_sampling` say.

    Raises:
        PenstockError: a parameter is out of bounds, or the key or a TLS file cannot be used.
    """
    params = sampling_params(arguments)
    if arguments.base_url is not None:
        with _http_client(arguments) as http:
            given = {name: value for name, value in params.items() if value != []}
            yield OpenAIServer(http, given, arguments.model, arguments.timeout_s)
        return
    api_key = arguments.api_key or os.environ.get(API_KEY_VARIABLE) or None
    address = DEFAULT_ADDRESS if arguments.address is None else arguments.address
    with Client(address, api_key=api_key, tls=client_tls(arguments)) as client:
        yield Gateway(client, params, arguments.model, arguments.timeout_s)


def _http_client(arguments: argparse.Namespace) -> httpx.Client:
    api_key = arguments.api_key or os.environ.get(OPENAI_KEY_VARIABLE)
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise invalid("the API key has characters that no header can carry", "api_key")
    return httpx.Client(
        base_url=arguments.base_url,
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(arguments.timeout_s, connect=_CONNECT_TIMEOUT_S),
        verify=_tls_context(arguments) if arguments.tls_ca or arguments.tls_cert else True,
    )


def _tls_context(arguments: argparse.Namespace) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=arguments.tls_ca)
        if arguments.tls_cert is not None:
            context.load_cert_chain(arguments.tls_cert, arguments.tls_key)
    except OSError as error:  # ssl.SSLError is one
        raise invalid(f"a file of --tls-ca, --tls-cert and --tls-key cannot be used: {error}") from error
    return context
