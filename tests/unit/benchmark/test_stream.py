"""A benchmark's own client, on answers however they are cut."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.benchmark.stream import Outcome, Server


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TEXTS = [event(choices=[{"index": 0, "text": text, "logprobs": None}]) for text in ("a", "", "b")]
USAGE = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7})
DONE = b"data: [DONE]\n\n"


def ask(answer: bytes, *, cut: int = 0, calls: int = 1) -> tuple[list[Outcome], bool]:
    """Call a server whose answers come `cut` bytes at a time, 0: all at once; the outcomes, and if it is open after."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(calls):
            head = await reader.readuntil(b"\r\n\r\n")
            [length] = [int(line[16:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
            await reader.readexactly(length)
            for at in range(0, len(answer), cut or len(answer)):
                writer.write(answer[at : at + (cut or len(answer))])
                await writer.drain()
                await asyncio.sleep(0)
        if b"transfer-encoding" not in answer:
            writer.close()
        await reader.read()
        writer.close()

    async def run() -> tuple[list[Outcome], bool]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            called = Server.at(f"http://127.0.0.1:{port}", "/v1/completions", "key")
            connection = await called.connect()
            found: Sequence[Outcome] = [await connection.call(called.request(b"{}")) for _ in range(calls)]
            is_open = connection.is_open
            connection.close()
        return list(found), is_open

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("cut", [0, 1, 7])
def test_events_with_text_are_counted_and_the_usage_is_the_servers(cut: int) -> None:
    [outcome], is_open = ask(HEAD + chunked(*TEXTS, USAGE, DONE), cut=cut)
    assert (outcome.error, len(outcome.told_s), outcome.prompt_tokens, outcome.output_tokens) == ("", 2, 3, 4)
    assert outcome.sent_s <= outcome.told_s[0] <= outcome.told_s[-1] <= outcome.ended_s
    assert is_open


def test_a_connection_serves_one_call_after_the_other() -> None:
    outcomes, _ = ask(HEAD + chunked(*TEXTS, USAGE, DONE), calls=3)
    assert [(each.error, len(each.told_s)) for each in outcomes] == [("", 2)] * 3


def test_a_role_is_no_token_and_thoughts_and_calls_are() -> None:
    deltas = ({"role": "assistant", "content": ""}, {"reasoning": "hm"}, {"tool_calls": [{}]}, {"content": "a"}, {})
    [outcome], _ = ask(HEAD + chunked(*(event(choices=[{"delta": delta}]) for delta in deltas), DONE))
    assert (len(outcome.told_s), outcome.output_tokens) == (3, 3)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 429 Too Many\r\ncontent-length: 9\r\n\r\nqueue ful", "HTTP 429: queue ful"),
        (HEAD + chunked(TEXTS[0], event(error={"message": "away"})), "away"),
        (HEAD + chunked(b"data: {\n\n"), "not as OpenAI's"),
        (b"SSH-2.0-nonsense\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\ndata: ", "the connection broke"),
    ],
)
def test_what_goes_wrong_is_said(answer: bytes, said: str) -> None:
    [outcome], _ = ask(answer)
    assert said in outcome.error
