"""`penstock chat`: talks with the model in the terminal; it remembers what was said."""

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from contract.domain.errors import PenstockError
from contract.domain.request import Message
from penstock.cli.answers import Answers, Piece, add_server, open_answers, parse_server
from penstock.cli.arguments import add_sampling

_HELP = "Empty line or Ctrl-D: leave.  /new: begin anew.  Ctrl-C: stop the answer."


def main(argv: Sequence[str]) -> int:
    """Asks and answers until the input ends; the exit status is 1 if an answer failed and nobody could react."""
    parser = argparse.ArgumentParser(prog="penstock chat", description=__doc__, allow_abbrev=False)
    add_server(parser)
    add_sampling(parser, max_tokens=512)
    parser.add_argument("--system", help="how the model is to behave")
    arguments = parse_server(parser, argv)
    console = Console(highlight=False, emoji=False)
    with open_answers(arguments) as answers:
        console.print(f"[bold]{escape(answers.model_name())}[/bold]  [dim]{_HELP}[/dim]\n")
        return _talk(answers, console, [Message("system", arguments.system)] if arguments.system else [])


def _talk(answers: Answers, console: Console, opening: Sequence[Message]) -> int:
    history = list(opening)
    while question := _ask(console):
        if question == "/new":
            history = list(opening)
            continue
        history.append(Message("user", question))
        try:
            answer = _answer(answers, console, history)
        except PenstockError as error:
            console.print()
            Console(stderr=True, highlight=False, emoji=False).print(
                error.message, style="red", markup=False, soft_wrap=True
            )
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


def _answer(answers: Answers, console: Console, history: Sequence[Message]) -> str:
    """Streams one answer; Ctrl-C ends it, and what was said until then counts."""
    console.print("[bold green]bot[/bold green]  ", end="")
    said: list[Piece] = []
    first_s = 0.0
    began_s = time.monotonic()
    pieces = answers.chat(history)
    try:
        for piece in pieces:
            first_s = first_s or time.monotonic() - began_s
            _show(console, piece, begins_text=bool(piece.text) and _thinks(said))
            said.append(piece)
    except KeyboardInterrupt:
        console.print(" [dim]…[/dim]", end="")
    finally:
        pieces.close()
    num_tokens = max((piece.num_tokens for piece in said), default=0)
    console.print(f"\n[dim]     {_figures(num_tokens, first_s, time.monotonic() - began_s)}[/dim]\n")
    return "".join(piece.text for piece in said)


def _thinks(said: Sequence[Piece]) -> bool:
    """Return whether thoughts are all that was said until now."""
    return any(piece.reasoning for piece in said) and not any(piece.text for piece in said)


def _show(console: Console, piece: Piece, *, begins_text: bool) -> None:
    if piece.reasoning:
        console.print(piece.reasoning, end="", markup=False, soft_wrap=True, style="dim")
    if begins_text:
        console.print("\n")
    console.print(piece.text, end="", markup=False, soft_wrap=True)


def _figures(num_tokens: int, first_s: float, took_s: float) -> str:
    tokens = f"{num_tokens} tokens, " if num_tokens else ""  # not every server tells
    speed = f", {(num_tokens - 1) / max(took_s - first_s, 1e-9):.0f} tok/s" if num_tokens > 1 else ""
    return f"{tokens}first after {1000 * first_s:.0f} ms{speed}"
