"""`penstock status`: the pipeline as its gateway knows it."""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table

from contract.domain.api_keys import CONTROL_TOKEN_VARIABLE
from contract.domain.errors import invalid
from contract.v1 import status_pb2
from contract.wire.generation_defaults import decode_defaults
from penstock.cli.arguments import add_connection, client_tls
from penstock.client import Client

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 86_400.0
_ORDER = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")
_GENERATED = "generated_tokens_total"
_DIGEST_CHARS = 16


class Rate:
    """The growth of a count between one look and the next."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def observe(self, total: float, now_s: float) -> float | None:
        """Units a second since the last look; None at the first, or when the count began anew."""
        last, self._last = self._last, (total, now_s)
        if last is None or total < last[0] or now_s <= last[1]:
            return None
        return (total - last[0]) / (now_s - last[1])


def main(argv: Sequence[str]) -> int:
    """Prints the pipeline once, or again and again; the exit status is 1 if a service is missing or not ready."""
    parser = argparse.ArgumentParser(prog="penstock status", description=__doc__, allow_abbrev=False)
    add_connection(parser)
    parser.add_argument("--pool", default="", help="which one, of a gateway that serves several [its first]")
    parser.add_argument("--watch", action="store_true", help="repeat until Ctrl-C")
    parser.add_argument("--interval-s", type=_interval, default=1.0, help="seconds between two looks, 0.1 or more [1]")
    parser.add_argument(
        "--control-token-file",
        metavar="FILE",
        type=Path,
        default=os.environ.get(CONTROL_TOKEN_VARIABLE) or None,
        help=f"file of the control token, for a pipeline that asks for one [none; {CONTROL_TOKEN_VARIABLE}]",
    )
    arguments = parser.parse_args(argv)
    rate = Rate()
    token = _read_token(arguments.control_token_file)
    with Client(
        arguments.address, timeout_s=10.0, api_key=arguments.api_key, tls=client_tls(arguments), control_token=token
    ) as client:
        status = client.pipeline(arguments.pool)
        rate.observe(total(status, _GENERATED), time.monotonic())
        # Two looks: one alone tells no rate.
        time.sleep(min(arguments.interval_s, 1.0))
        if not arguments.watch:
            status = client.pipeline(arguments.pool)
            Console().print(render(status, rate.observe(total(status, _GENERATED), time.monotonic())))
            return 0 if is_complete(status) else 1
        with Live(screen=False, refresh_per_second=4) as live:
            while True:
                status = client.pipeline(arguments.pool)
                live.update(render(status, rate.observe(total(status, _GENERATED), time.monotonic())))
                time.sleep(arguments.interval_s)


def _interval(text: str) -> float:
    seconds = float(text)
    if not MIN_INTERVAL_S <= seconds <= MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"give seconds in [{MIN_INTERVAL_S:g}, {MAX_INTERVAL_S:g}], got {text}")
    return seconds


def _read_token(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text("ascii").strip()
    except (OSError, ValueError) as error:
        raise invalid(f"--control-token-file {path} cannot be read: {error}", "control_token_file") from error


def total(status: status_pb2.PipelineStatus, figure: str) -> float:
    """A figure added up over the living sessions."""
    return sum(session.status.figures.get(figure, 0.0) for session in status.sessions if session.alive)


def is_complete(status: status_pb2.PipelineStatus) -> bool:
    """Return whether each of the five services has a living session that is ready."""
    return {session.kind for session in status.sessions if session.alive and session.status.ready} >= set(_ORDER)


def render(status: status_pb2.PipelineStatus, tokens_per_s: float | None) -> RenderableType:
    """The tables: figures of the whole, sessions, hops."""
    return Group(_figures(status, tokens_per_s), _sessions(status), *_notes(status), _hops(status))


def _figures(status: status_pb2.PipelineStatus, tokens_per_s: float | None) -> Table:
    lengths = {stream.stream: stream.length for stream in status.streams}
    used, cached, blocks = (total(status, f"blocks_{name}") for name in ("used", "cached", "total"))
    share = used / blocks if blocks else 0.0
    rows = {
        "pool": status.pool,
        "prompts queued": f"{lengths.get('prompts', 0)}",
        "requests queued": f"{lengths.get('requests', 0)}",
        "waiting": f"{total(status, 'waiting'):.0f} sequences",
        "running": f"{total(status, 'running'):.0f} sequences",
        "KV blocks": f"{used:.0f} used, {cached:.0f} cached of {blocks:.0f} ({share:.1%})",
        "generated": f"{total(status, _GENERATED):.0f} tokens",
        "speed": "–" if tokens_per_s is None else f"{tokens_per_s:,.0f} tok/s",
        "preemptions": f"{total(status, 'preemptions_total'):.0f}",
        "dead letters": f"{lengths.get('dead', 0)}",
        "model's defaults": _defaults(status),
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(f"[dim]{name}[/dim]", value)
    return table


def _defaults(status: status_pb2.PipelineStatus) -> str:
    """The parameters that hold where a request does not say otherwise, as tokenizers tell them."""
    for session in status.sessions:
        if session.alive and session.status.HasField("generation_defaults"):
            stated = decode_defaults(session.status.generation_defaults).stated
            shown = {
                name: f"{len(value)} tokens" if isinstance(value, tuple) else f"{value:g}"
                for name, value in stated.items()
            }
            return ", ".join(f"{name} {value}" for name, value in shown.items()) or "OpenAI's"
    return "–"


def _sessions(status: status_pb2.PipelineStatus) -> Table:
    digest = Column("model", min_width=_DIGEST_CHARS, no_wrap=True)  # to be compared with `system_fingerprint`
    table = Table("service", "name", "state", "requests", digest, "gRPC", "up", box=None, padding=(0, 2, 0, 0))
    now_s = time.time()
    for session in sorted(status.sessions, key=lambda each: (_rank(each.kind), each.name)):
        told = session.status
        state = "[red]gone[/red]"
        if session.alive:
            state = (
                "draining" if told.draining else "[green]ready[/green]" if told.ready else "[yellow]not ready[/yellow]"
            )
        up = _duration(now_s - told.started_unix_ns * 1e-9) if told.started_unix_ns and session.alive else "–"
        requests, model = str(session.owned_requests), told.model_digest or "–"
        table.add_row(session.kind, session.name, state, requests, model, session.address or "–", up)
    return table


def _notes(status: status_pb2.PipelineStatus) -> list[str]:
    told = [(session.name, session.status.note) for session in status.sessions if session.alive]
    return [f"[yellow]{name}[/yellow]: {note}" for name, note in told if note]


def _hops(status: status_pb2.PipelineStatus) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("hop", "read by", "messages/s", "wait p50", "wait p99", "work p50", "work p99"):
        table.add_column(name, justify="left" if name in ("hop", "read by") else "right")
    for session in sorted(status.sessions, key=lambda each: (_rank(each.kind), each.name)):
        for hop in session.status.hops if session.alive else ():
            times = (hop.wait_p50_s, hop.wait_p99_s, hop.work_p50_s, hop.work_p99_s)
            table.add_row(hop.hop, session.name, f"{hop.rate:,.1f}", *(_duration(each) for each in times))
    return table


def _rank(kind: str) -> int:
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def _duration(seconds: float) -> str:
    if seconds <= 0:
        return "–"
    for unit, size in (("µs", 1e-6), ("ms", 1e-3)):
        if seconds < size * 1000:
            return f"{seconds / size:.3g} {unit}"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
