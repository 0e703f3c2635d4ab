"""`penstock complete`: continues a text."""

import argparse
import sys
from collections.abc import Sequence

from penstock.cli.answers import add_server, open_answers, parse_server
from penstock.cli.arguments import add_sampling


def main(argv: Sequence[str]) -> int:
    """Streams the continuation to standard output; the exit status."""
    parser = argparse.ArgumentParser(prog="penstock complete", description=__doc__, allow_abbrev=False)
    add_server(parser)
    add_sampling(parser, max_tokens=128)
    parser.add_argument(
        "prompt", nargs="?", help="the text; without it, standard input is read, without its last line break"
    )
    arguments = parse_server(parser, argv)
    # A file ends with a line break, and so does what a terminal or `echo` gives: it is not part of the text.
    prompt = sys.stdin.read().removesuffix("\n") if arguments.prompt is None else arguments.prompt
    with open_answers(arguments) as answers:
        for piece in answers.complete(prompt):
            print(piece.text, end="", flush=True)
    print()
    return 0
