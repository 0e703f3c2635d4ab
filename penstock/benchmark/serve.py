"""`penstock bench serve`: requests to a server with OpenAI's API, and how long each took.

Sends what --dataset-name says, at --request-rate, as streams, to this or any other server, and tells throughput and
latencies by the names of vLLM's benchmark. A request that fails is counted and told, and the exit status is 1.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import uvloop
from tqdm import tqdm

from contract.domain.errors import ErrorCode, PenstockError, invalid
from penstock.benchmark import measures, report
from penstock.benchmark.arrivals import add_arrivals, arrival_times
from penstock.benchmark.datasets import Sample, add_dataset, make_samples, tokenizer_of
from penstock.benchmark.stream import Outcome, Server, StreamConnection
from penstock.cli.arguments import add_http_server

_ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_LOOK_TIMEOUT_S = 60.0
_LOOK_AGAIN_S, _ROOT_WAIT_S = 0.2, 10.0
_Call = Callable[[bytes], Awaitable[Outcome]]


def main(argv: Sequence[str]) -> int:
    """Runs it; the exit status is 1 if a request failed."""
    arguments = _parser().parse_args(argv)
    bounds = measures.parse_goodput(arguments.goodput)
    percentiles = _percentiles(arguments.metric_percentiles)
    if arguments.plot is not None:
        report.check_plot(arguments.plot)
    model, root = _look(arguments)
    samples = make_samples(arguments, tokenizer_of(arguments.tokenizer or root))
    bodies = [_body(arguments, model, sample) for sample in samples]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcomes = runner.run(_run(arguments, bodies))
    found = measures.figures(outcomes, percentiles, bounds)
    report.show(found)
    for error in sorted({each.error for each in outcomes if each.error})[:5]:
        print(f"failed: {error}", file=sys.stderr)
    if arguments.save_result is not None:
        report.save(arguments.save_result, found, _setting(arguments, model), outcomes)
    if arguments.plot is not None:
        report.plot(arguments.plot, found, outcomes)
    return int(found["failed"] > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock bench serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_http_server(parser)
    parser.add_argument("--endpoint", choices=tuple(_ENDPOINTS), default="completions", help="[completions]")
    parser.add_argument("--model", default="", metavar="NAME", help="[the server's first]")
    parser.add_argument(
        "--tokenizer", default="", metavar="DIR", help="directory or hub id [what the server says of its model]"
    )
    add_dataset(parser)
    add_arrivals(parser)
    parser.add_argument("--ignore-eos", action="store_true", help="every output has as many tokens as it is asked for")
    parser.add_argument("--temperature", type=float, help="[0 for --endpoint completions and chat alike]", default=0.0)
    parser.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="further fields of each request"
    )
    parser.add_argument("--num-warmups", type=int, default=1, metavar="N", help="requests before, not counted [1]")
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="requests count for the goodput whose ttft, tpot and e2el are within these",
    )
    parser.add_argument("--metric-percentiles", default="50,90,99", metavar="P,P", help="[50,90,99]")
    parser.add_argument("--save-result", type=Path, metavar="FILE", help="JSON of it all, request by request")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture of it, .png, .svg or .pdf")
    return parser


def _json_object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("give a JSON object")
    return found


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= each <= 100 for each in found):
        raise invalid(f"--metric-percentiles takes numbers from 0 to 100, separated by commas, got {text!r:.80}")
    return found


def _look(arguments: argparse.Namespace) -> tuple[str, str]:
    """The model's name, and where its tokenizer is.

    Raises:
        PenstockError: the server does not answer, or does not say what it serves.
    """
    models, until_s = _roots(arguments), time.monotonic() + _ROOT_WAIT_S
    model = arguments.model or next(iter(models), "")
    if model not in models:
        raise invalid(f"the server has no model {model!r}; it has {', '.join(models) or 'none'}", "model")
    # A pipeline that has just started does not know yet what its workers load.
    while models.get(model) is None and not arguments.tokenizer and time.monotonic() < until_s:
        time.sleep(_LOOK_AGAIN_S)
        models = _roots(arguments)
    return model, models.get(model) or model


def _roots(arguments: argparse.Namespace) -> dict[str, str | None]:
    """By model: the directory or hub id of its checkpoint; None: the server does not say it, or not yet."""
    headers = {"authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    try:
        reply = httpx.get(f"{arguments.base_url.rstrip('/')}/v1/models", headers=headers, timeout=_LOOK_TIMEOUT_S)
        reply.raise_for_status()
        return {each["id"]: each.get("root", each["id"]) for each in reply.json()["data"]}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise PenstockError(ErrorCode.INTERNAL, f"{arguments.base_url}/v1/models does not answer: {error}") from error


def _body(arguments: argparse.Namespace, model: str, sample: Sample) -> bytes:
    fields: dict[str, Any] = {"model": model, "temperature": arguments.temperature, "stream": True}
    fields["stream_options"] = {"include_usage": True}
    if arguments.endpoint == "completions":
        fields |= {"prompt": sample.prompt, "max_tokens": sample.output_len}
    elif isinstance(sample.prompt, str):
        messages = [{"role": "user", "content": sample.prompt}]
        fields |= {"messages": messages, "max_completion_tokens": sample.output_len}
    else:
        raise invalid("a chat takes texts: leave out --prompts-as-ids", "prompts_as_ids")
    if arguments.ignore_eos:
        fields["ignore_eos"] = True
    return json.dumps(fields | arguments.extra_body).encode()


def _setting(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """What was asked for; keys stay out of it."""
    told = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    told |= {"model": model, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    told["request_rate"] = str(arguments.request_rate)
    return {name: value for name, value in told.items() if name != "api_key"}


async def _run(arguments: argparse.Namespace, bodies: Sequence[bytes]) -> list[Outcome]:
    """Sends every request at its time; what became of each."""
    server = Server.at(arguments.base_url, _ENDPOINTS[arguments.endpoint], arguments.api_key)
    call = _Connections(server).call
    for body in bodies[: arguments.num_warmups]:
        outcome = await call(server.request(body))
        if outcome.error:
            raise PenstockError(ErrorCode.INTERNAL, f"the first request failed: {outcome.error}")
    gate = asyncio.Semaphore(arguments.max_concurrency or len(bodies))
    begin_s = time.perf_counter()
    with tqdm(total=len(bodies), unit="req", disable=not sys.stderr.isatty()) as progress:

        async def one(request: bytes) -> Outcome:
            async with gate:
                outcome = await call(request)
            progress.update()
            return outcome

        tasks = []
        times = arrival_times(len(bodies), arguments.request_rate, arguments.burstiness, arguments.seed)
        for body, at_s in zip(bodies, times, strict=True):
            await asyncio.sleep(max(0.0, begin_s + at_s - time.perf_counter()))
            tasks.append(asyncio.create_task(one(server.request(body))))
        return list(await asyncio.gather(*tasks))


class _Connections:
    """Connections that are used again."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._idle: deque[StreamConnection] = deque()

    async def call(self, request: bytes) -> Outcome:
        """Sends one request on a connection of its own."""
        sent_s = time.perf_counter()
        try:
            connection = self._take() or await self._server.connect()
        except OSError as error:
            return Outcome(sent_s, time.perf_counter(), error=f"the server cannot be reached: {error}")
        outcome = await connection.call(request)
        outcome.sent_s = sent_s  # to connect is part of it
        if connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()
        return outcome

    def _take(self) -> StreamConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None
