"""`penstock trace ID`: draws the way of a request through the pipeline, from its client's byte and back."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from contract.domain.errors import ErrorCode, PenstockError
from penstock.cli.arguments import add_http_server

_TIMEOUT_S = 30.0
_WIDTH = 48  # characters of the longest bar


@dataclass(frozen=True, slots=True)
class Bar:
    """One stage of a request."""

    name: str
    start_ms: float  # after the gateway accepted it
    end_ms: float
    note: str = ""


def main(argv: Sequence[str]) -> int:
    """Prints a line for each stage; the exit status."""
    parser = argparse.ArgumentParser(prog="penstock trace", description=__doc__, allow_abbrev=False)
    parser.add_argument("request_id", metavar="ID", help="as x-penstock-request-id tells it, or the id of a reply")
    add_http_server(parser)
    arguments = parser.parse_args(argv)
    body = _ask(arguments.base_url, _plain_id(arguments.request_id), arguments.api_key)
    print("\n".join(lines(body)))
    return 0


def lines(body: Mapping[str, Any]) -> Iterator[str]:
    """A timeline as the gateway tells it, drawn."""
    yield f"{body['id']}  {body['model']}  {body['state']}"
    for request in body["requests"]:
        bars = list(stages(request["moments"]))
        if len(body["requests"]) > 1:
            yield f"\n{request['request_id']}  {request['state']}"
        if len(bars) <= 1 and request["state"] != "ended":
            yield "  it has not ended: what happened to it when is told then"
            continue
        most_ms = max(bar.end_ms for bar in bars) or 1.0
        yield from (_drawn(bar, most_ms) for bar in bars)
        if request["num_more_starts"]:
            yield f"  and {request['num_more_starts']} more starts"


def stages(moments: Sequence[Mapping[str, Any]]) -> Iterator[Bar]:
    """The stages between moments; those that a request did not reach are left out."""
    at = {each["name"]: each["ms"] for each in moments if each["name"] != "started"}
    starts = [each for each in moments if each["name"] == "started"]
    end_ms = at.get("last_token", at.get("result", 0.0))
    yield Bar("submit", 0.0, at.get("tokenizing", end_ms))
    if "tokenized" in at:
        yield Bar("tokenize", at["tokenizing"], at["tokenized"])
        claimed = f"claimed at {at['claimed']:.1f}" if "claimed" in at else ""
        yield Bar("queue", at["tokenized"], min((each["ms"] for each in starts), default=end_ms), claimed)
    for number, start in enumerate(starts):
        later = [each["ms"] for each in starts[number + 1 :] if each["sample"] == start["sample"]]
        until_ms = min(later, default=end_ms)
        first_ms = until_ms if start["first_token_ms"] is None else start["first_token_ms"]
        place = f"{start['worker']} step {start['step']}"
        reason = "" if start["reason"] == "first" else f", {start['reason']} after {start['num_tokens']} tokens"
        sample = f" {start['sample']}" if len({each["sample"] for each in starts}) > 1 else ""
        yield Bar(f"prefill{sample}", start["ms"], first_ms, place + reason)
        yield Bar(f"decode{sample}", first_ms, until_ms)
    if "result" in at:
        yield Bar("detokenize", end_ms, at["result"])
    if "delivered" in at:
        yield Bar("deliver", end_ms, at["delivered"])


def _drawn(bar: Bar, most_ms: float) -> str:
    before = round(_WIDTH * bar.start_ms / most_ms)
    size = max(1, round(_WIDTH * (bar.end_ms - bar.start_ms) / most_ms))
    drawn = " " * min(before, _WIDTH - 1) + "█" * size
    times = f"{bar.start_ms:9.1f} {bar.end_ms - bar.start_ms:+9.1f} ms"
    return f"  {bar.name:<11} {times}  {drawn:<{_WIDTH + 1}} {bar.note}".rstrip()


def _plain_id(text: str) -> str:
    """A request's id without what stands before it in a reply's."""
    return text.removeprefix("chatcmpl-").removeprefix("cmpl-")


def _ask(base_url: str, request_id: str, api_key: str | None) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    url = f"{base_url.rstrip('/')}/v1/requests/{request_id}/timeline"
    try:
        answer = httpx.get(url, headers=headers, timeout=_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise PenstockError(ErrorCode.UNAVAILABLE, f"{base_url} does not answer: {error}") from error
    try:
        body: dict[str, Any] = answer.json()
        refusal = None if answer.status_code == httpx.codes.OK else str(body["error"]["message"])
    except (ValueError, KeyError, TypeError) as error:
        raise PenstockError(ErrorCode.INTERNAL, f"{url} is no timeline of a gateway: {answer.text[:200]}") from error
    if refusal is not None:
        raise PenstockError(ErrorCode.NOT_FOUND, refusal)
    return body
