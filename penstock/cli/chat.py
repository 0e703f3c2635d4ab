"""`penstock chat`: talks with the model in the terminal; it remembers what was said."""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.request import Message
from penstock.cli.arguments import add_connection, add_sampling, client_tls, sampling_params
from penstock.client import Client, Delta

_HELP = "Empty line or Ctrl-D: leave.  /new: begin anew.  Ctrl-C: stop the answer."


def main(argv: Sequence[str]) -> int:
    """Asks and answers until the input ends; the exit status is 1 if an answer failed and nobody could react."""
    parser = argparse.ArgumentParser(prog="penstock chat", description=__doc__, allow_abbrev=False)
    add_connection(parser)
    add_sampling(parser, max_tokens=512)
    parser.add_argument("--system", help="how the model is to behave")
    arguments = parser.parse_args(argv)
    params = sampling_params(arguments)
    console = Console(highlight=False)
    with Client(arguments.address, api_key=arguments.api_key, tls=client_tls(arguments)) as client:
        models = client.models()
        if not models:
            raise PenstockError(ErrorCode.UNAVAILABLE, "no worker has registered a model yet: try again in a moment")
        console.print(f"[bold]{escape(models[0].name)}[/bold]  [dim]{_HELP}[/dim]\n")
        opening = [Message("system", arguments.system)] if arguments.system else []
        history = list(opening)
        while question := _ask(console):
            if question == "/new":
                history = list(opening)
                continue
            history.append(Message("user", question))
            try:
                answer = _answer(client, console, history, params, arguments.timeout_s)
            except PenstockError as error:
                console.print(f"{error.message}\n", style="red", markup=False)
                history.pop()
                if not sys.stdin.isatty():
                    return 1
                continue
            history.append(Message("assistant", answer))
    return 0


def _ask(console: Console) -> str:
    try:
        return console.input("[bold cyan]you[/bold cyan]  ").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return ""


def _answer(
    client: Client, console: Console, history: Sequence[Message], params: Mapping[str, Any], timeout_s: float | None
) -> str:
    """Streams one answer; Ctrl-C ends it, and what was said until then counts."""
    console.print("[bold green]bot[/bold green]  ", end="")
    text, num_tokens, first_s = "", 0, 0.0
    began_s = time.monotonic()
    events = client.generate(messages=history, params=params, timeout_s=timeout_s, resumable=True)
    try:
        for event in events:
            if isinstance(event, Delta):
                first_s = first_s or time.monotonic() - began_s
                num_tokens += len(event.token_ids)
                text += event.text
                console.print(event.text, end="", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print(" [dim]…[/dim]", end="")
    finally:
        events.close()
    took_s = max(time.monotonic() - began_s - first_s, 1e-9)
    speed = f", {(num_tokens - 1) / took_s:.0f} tok/s" if num_tokens > 1 else ""
    console.print(f"\n[dim]     {num_tokens} tokens, first after {1000 * first_s:.0f} ms{speed}[/dim]\n")
    return text
