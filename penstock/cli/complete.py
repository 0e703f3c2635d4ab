"""`penstock complete`: continues a text."""

import argparse
import sys
from collections.abc import Sequence

from penstock.cli.arguments import add_connection, add_sampling, client_tls, sampling_params
from penstock.client import Client, Delta


def main(argv: Sequence[str]) -> int:
    """Streams the continuation to standard output; the exit status."""
    parser = argparse.ArgumentParser(prog="penstock complete", description=__doc__, allow_abbrev=False)
    add_connection(parser)
    add_sampling(parser, max_tokens=128)
    parser.add_argument(
        "prompt", nargs="?", help="the text; without it, standard input is read, without its last line break"
    )
    arguments = parser.parse_args(argv)
    # A file ends with a line break, and so does what a terminal or `echo` gives: it is not part of the text.
    prompt = sys.stdin.read().removesuffix("\n") if arguments.prompt is None else arguments.prompt
    params = sampling_params(arguments)
    with Client(arguments.address, api_key=arguments.api_key, tls=client_tls(arguments)) as client:
        for event in client.generate(prompt, params, timeout_s=arguments.timeout_s, resumable=True):
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)
    print()
    return 0
