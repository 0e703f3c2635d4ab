"""The command `penstock`."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from contract.domain.errors import Fault, PenstockError
from penstock import __version__

_COMMANDS = {
    "serve": "start the whole pipeline on this machine",
    "check": "say whether `serve` with the same flags would start",
    "gateway": "run one gateway: HTTP and gRPC",
    "tokenizer": "run one tokenizer",
    "scheduler": "run one scheduler",
    "worker": "run one worker",
    "detokenizer": "run one detokenizer",
    "chat": "talk with the model in the terminal",
    "complete": "continue a text",
    "status": "show what the pipeline does",
    "trace": "draw the way of one request",
    "run-batch": "carry out a file of requests on an OpenAI server",
    "models": "list the models that workers load",
    "keys": "make API keys",
    "tune": "measure a model's products on this GPU, for its workers",
    "bench": "measure a server or a model; benchmarks of the repository",
    "collect-env": "show what this machine has, for a report",
}
_SERVICES = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status: 1 if it failed, 2 if it was called or installed wrongly, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    lines = "\n".join(f"  {name:<12} {text}" for name, text in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Serves large language models as a pipeline of small services.",
        epilog=f"commands:\n{lines}\n\n`penstock COMMAND --help` lists what a command can be told.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND", help="one of those below")
    name = parser.parse_args(arguments[:1]).command
    module = import_module(f"{name}_svc.__main__" if name in _SERVICES else f"penstock.cli.{name.replace('-', '_')}")
    command: Callable[[Sequence[str]], int] = module.main
    try:
        return command(arguments[1:])
    except PenstockError as error:
        print(f"penstock {name}: {error.message}", file=sys.stderr)
        return 2 if error.fault is Fault.OPERATOR else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Who read our output has gone; nothing more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
