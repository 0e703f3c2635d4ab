"""`penstock run-batch`: carries out a file of requests, in OpenAI's form of batches, on any server with OpenAI's API.

Each line of the input is a JSON object: custom_id, method (POST), url (such as /v1/chat/completions) and body. Each
line of the output is one with its custom_id, and the response or the error. Lines come in the order in which they
end. What is too early for the server (429, 503) or breaks is sent again, with an `Idempotency-Key` that belongs to
the line: of Penstock it is one request, however often it is sent. A run that was ended goes on with --resume.
"""

import argparse
import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx
from tqdm import tqdm

from contract.domain.errors import ErrorCode, PenstockError, invalid
from penstock.cli.arguments import add_http_server

_MAX_PAUSE_S = 30.0  # between two tries
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})  # unless the server says `x-should-retry: false`


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch."""

    custom_id: str
    url: str  # its path on the server
    body: dict[str, Any]

    def key(self, output: Path) -> str:
        """The idempotency key: the same for a line whose result goes to the same file, also in a run that goes on."""
        content = json.dumps([str(output.absolute()), self.custom_id, self.url, self.body], sort_keys=True)
        return f"batch-{hashlib.blake2b(content.encode(), digest_size=16).hexdigest()}"


def main(argv: Sequence[str]) -> int:
    """Carries the lines out; the exit status is 1 if some failed."""
    parser = argparse.ArgumentParser(
        prog="penstock run-batch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="lines of requests; -: standard input"
    )
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", help="where lines of results go")
    add_http_server(parser)
    parser.add_argument("--model", default="", metavar="NAME", help="for bodies that name none [the server's]")
    parser.add_argument("--concurrency", type=int, default=256, metavar="N", help="requests at once [256]")
    parser.add_argument("--timeout-s", type=float, default=3600.0, metavar="S", help="of one request [3600]")
    parser.add_argument("--max-retries", type=int, default=20, metavar="N", help="of one request [20]")
    parser.add_argument("--resume", action="store_true", help="leave out what the output file has an answer to")
    arguments = parser.parse_args(argv)
    output = Path(arguments.output_file)
    if output.exists() and not arguments.resume:
        raise PenstockError(ErrorCode.INTERNAL, f"{output} is there already: name another file, or go on with --resume")
    lines = _read(arguments.input_file, arguments.model)
    answered = _answered(output) if arguments.resume else set()
    left = {line.key(output): line for line in lines if line.custom_id not in answered}
    with output.open("a", encoding="utf-8") as file:
        num_failed = asyncio.run(_carry_out(left, len(lines), arguments, file))
    if num_failed:
        print(f"{num_failed} of {len(lines)} requests failed: their lines in {output} say why", file=sys.stderr)
    return int(num_failed > 0)


def parse_lines(texts: Iterator[str], model: str) -> list[Line]:
    """The requests of a batch; a body that names no model gets `model`.

    Raises:
        PenstockError: INVALID_ARGUMENT: a line is no request, or two have the same custom_id.
    """
    lines: dict[str, Line] = {}
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        line = _parse(number, text, model)
        if line.custom_id in lines:
            raise invalid(f"line {number}: custom_id {line.custom_id!r} stands there twice", "custom_id")
        lines[line.custom_id] = line
    return list(lines.values())


def _parse(number: int, text: str, model: str) -> Line:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise invalid(f"line {number} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise invalid(f"line {number} must be a JSON object")
    custom_id, method, url, body = (found.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise invalid(f"line {number}: custom_id must be a text", "custom_id")
    if method != "POST":
        raise invalid(f"line {number}: method must be POST, got {method!r:.40}", "method")
    if not isinstance(url, str) or not url.startswith("/"):
        raise invalid(f"line {number}: url must be a path such as /v1/chat/completions, got {url!r:.80}", "url")
    if not isinstance(body, dict):
        raise invalid(f"line {number}: body must be a JSON object", "body")
    if body.get("stream"):
        raise invalid(f"line {number}: a batch has no streams: leave out stream", "stream")
    return Line(custom_id, url, ({"model": model} if model else {}) | body)


def _read(name: str, model: str) -> list[Line]:
    if name == "-":
        return parse_lines(iter(sys.stdin), model)
    try:
        with Path(name).open(encoding="utf-8") as file:
            return parse_lines(iter(file), model)
    except (OSError, UnicodeDecodeError) as error:
        raise PenstockError(ErrorCode.INTERNAL, f"{name} cannot be read: {error}") from error


def _answered(output: Path) -> set[str]:
    """The custom_ids of lines that were answered well. The others, and a last line that was cut off, are taken away:
    they are asked for again.
    """
    if not output.exists():
        return set()
    content = output.read_bytes()
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    good = {line: result["custom_id"] for line in lines if _is_good(result := json.loads(line))}
    if b"".join(good) != content:
        output.write_bytes(b"".join(good))
    return set(good.values())


def _is_good(result: dict[str, Any]) -> bool:
    return result["response"] is not None and result["response"]["status_code"] == httpx.codes.OK


async def _carry_out(keyed: dict[str, Line], num_lines: int, arguments: argparse.Namespace, file: TextIO) -> int:
    """Writes a line for each; how many failed."""
    num_failed = 0
    progress = tqdm(total=num_lines, initial=num_lines - len(keyed), unit="req", disable=not sys.stderr.isatty())
    async with aclosing(_results(keyed, arguments)) as results:
        async for result in results:
            file.write(json.dumps(result, ensure_ascii=False) + "\n")
            file.flush()
            progress.update()
            num_failed += not _is_good(result)
    progress.close()
    return num_failed


async def _results(keyed: dict[str, Line], arguments: argparse.Namespace) -> AsyncGenerator[dict[str, Any], None]:
    """The results of lines, in the order of their ends."""
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    limits = httpx.Limits(max_connections=arguments.concurrency, max_keepalive_connections=arguments.concurrency)
    waiting = iter(keyed.items())
    async with httpx.AsyncClient(
        base_url=arguments.base_url, headers=headers, limits=limits, timeout=arguments.timeout_s
    ) as client:

        def start() -> set["asyncio.Task[dict[str, Any]]"]:
            entry = next(waiting, None)
            return {asyncio.create_task(_result(client, *entry, arguments.max_retries))} if entry is not None else set()

        running: set[asyncio.Task[dict[str, Any]]] = set()
        try:
            while len(running) < arguments.concurrency and (started := start()):
                running |= started
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    running |= start()
                    yield task.result()
        finally:
            for task in running:
                task.cancel()


async def _result(client: httpx.AsyncClient, key: str, line: Line, max_retries: int) -> dict[str, Any]:
    identity = {"id": f"batch_req_{key.removeprefix('batch-')}", "custom_id": line.custom_id}
    try:
        answer = await send(client, key, line, max_retries)
    except httpx.HTTPError as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        return identity | {"response": None, "error": {"code": "unreachable", "message": reason}}
    try:
        body = answer.json()
    except ValueError:
        body = answer.text
    response = {
        "status_code": answer.status_code,
        "request_id": answer.headers.get("x-request-id", ""),
        "body": body,
    }
    return identity | {"response": response, "error": None}


async def send(client: httpx.AsyncClient, key: str, line: Line, max_retries: int) -> httpx.Response:
    """The answer to a request, tried again while another try may help.

    Raises:
        httpx.HTTPError: the server could not be reached, the last time either.
    """
    for number in range(max_retries + 1):
        pause_s = min(_MAX_PAUSE_S, 0.5 * 2**number)
        try:
            answer = await client.post(line.url, json=line.body, headers={"Idempotency-Key": key})
        except httpx.TransportError:
            if number == max_retries:
                raise
        else:
            is_final = answer.status_code not in _AGAIN or answer.headers.get("x-should-retry") == "false"
            if is_final or number == max_retries:
                return answer
            pause_s = _pause_s(answer, pause_s)
        await asyncio.sleep(pause_s)
    raise AssertionError("the last try returns or raises")


def _pause_s(answer: httpx.Response, otherwise_s: float) -> float:
    """Seconds that the server asks for; what else would be waited if it says none."""
    text = answer.headers.get("retry-after", "")
    return min(_MAX_PAUSE_S, float(text)) if text.isdecimal() else otherwise_s
