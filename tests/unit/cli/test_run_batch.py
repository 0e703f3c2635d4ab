"""Files of requests: what is no request is refused before any is sent, and what may help is tried again."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from contract.domain.errors import PenstockError
from penstock.cli import run_batch
from penstock.cli.run_batch import Line, parse_lines, send

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p"}}


def parsed(*lines: object, model: str = "") -> list[Line]:
    return parse_lines(iter([json.dumps(line) for line in lines]), model)


def test_a_line_is_a_request_and_empty_ones_are_none() -> None:
    found = parse_lines(iter([json.dumps(LINE) + "\n", "\n", json.dumps(LINE | {"custom_id": "b"})]), "")
    assert found == [Line("a", "/v1/completions", {"prompt": "p"}), Line("b", "/v1/completions", {"prompt": "p"})]


def test_the_model_is_for_bodies_that_name_none() -> None:
    named = LINE | {"custom_id": "b", "body": {"prompt": "p", "model": "other"}}
    assert [line.body["model"] for line in parsed(LINE, named, model="mine")] == ["mine", "other"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"custom_id": 3}, "custom_id"),
        ({"custom_id": ""}, "custom_id"),
        ({"method": "GET"}, "method"),
        ({"url": "https://elsewhere/v1/completions"}, "url"),
        ({"body": "text"}, "body"),
        ({"body": {"prompt": "p", "stream": True}}, "stream"),
    ],
)
def test_a_line_that_is_no_request_is_refused_by_name(changes: dict[str, object], param: str) -> None:
    with pytest.raises(PenstockError, match="line 2: ") as refused:
        parsed(LINE, LINE | {"custom_id": "b"} | changes)
    assert refused.value.param == param


def test_an_id_that_stands_there_twice_is_refused() -> None:
    with pytest.raises(PenstockError, match="line 2: custom_id 'a' stands there twice"):
        parsed(LINE, LINE)
    with pytest.raises(PenstockError, match="line 1 is not JSON"):
        parse_lines(iter(["{"]), "")


def test_the_key_of_a_line_is_that_of_its_results_file(tmp_path: Path) -> None:
    [line], [other] = parsed(LINE), parsed(LINE | {"body": {"prompt": "q"}})
    assert line.key(tmp_path / "a") == line.key(tmp_path / "a") != line.key(tmp_path / "b")
    assert line.key(tmp_path / "a") != other.key(tmp_path / "a")


def answers(*script: httpx.Response | Exception) -> tuple[httpx.AsyncClient, list[httpx.Request]]:
    seen: list[httpx.Request] = []
    left: Iterator[httpx.Response | Exception] = iter(script)

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://server"), seen


def sent(client: httpx.AsyncClient, max_retries: int = 5) -> httpx.Response:
    return asyncio.run(send(client, "key", Line("a", "/v1/completions", {}), max_retries))


def test_what_is_too_early_or_breaks_is_sent_again_as_the_same_request(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    monkeypatch.setattr(run_batch.asyncio, "sleep", sleep)
    early = httpx.Response(429, headers={"retry-after": "7"})
    client, seen = answers(early, httpx.ReadError("gone"), httpx.Response(503), httpx.Response(200))
    assert sent(client).status_code == 200
    assert [request.headers["idempotency-key"] for request in seen] == ["key"] * 4
    assert pauses == [7.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "answer", [httpx.Response(400), httpx.Response(404), httpx.Response(409, headers={"x-should-retry": "false"})]
)
def test_what_no_other_try_can_help_is_sent_once(answer: httpx.Response) -> None:
    client, seen = answers(answer)
    assert sent(client) is answer
    assert len(seen) == 1


def test_after_the_last_try_the_answer_is_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleep(_: float) -> None:
        return

    monkeypatch.setattr(run_batch.asyncio, "sleep", sleep)
    assert sent(answers(*[httpx.Response(503)] * 3)[0], max_retries=2).status_code == 503
    with pytest.raises(httpx.ConnectError):
        sent(answers(*[httpx.ConnectError("nobody")] * 3)[0], max_retries=2)
