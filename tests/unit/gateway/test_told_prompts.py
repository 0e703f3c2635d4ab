"""Replies that tell their prompts and the ids of tokens, and the form in which that is kept."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from contract.domain import chain
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.finish import FinishReason, Usage
from contract.domain.params import SamplingParams
from contract.domain.request import Header, Prompt, Request
from contract.domain.rows import TextRow
from gateway_svc import told_prompts, wire
from gateway_svc.core.ask import Form
from gateway_svc.core.openai import parse_chat, parse_completion
from gateway_svc.core.replies import Reply, ToldPrompt
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.sse import SseFormat
from gateway_svc.core.streams import DeliveredSequence
from gateway_svc.core.vocabulary import DetokenizeAsk, Prepared, TokenizeAsk
from gateway_svc.told_prompts import with_prompts

IDS = (b"a" * 16, b"b" * 16)
PROMPTS = (ToldPrompt("Once ", (1, 2)), ToldPrompt("Twice ", (3,)))


def form(kind: Form = Form.COMPLETION, **fields: Any) -> ReplyForm:
    return ReplyForm(request_ids=IDS, n=2, form=kind, model="m", arrival_ns=7, deadline_ns=0, seed=1, **fields)


def row(text: str, *token_ids: int, first: int = 0, finish: FinishReason = FinishReason.UNSPECIFIED) -> TextRow:
    return TextRow(IDS[0], 0, first, first, chain.CHAIN_START, token_ids, text, finish=finish)


def events(told: bytes) -> list[dict[str, Any]]:
    lines = [line for line in told.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


class Scripted:
    """A vocabulary in which a character is a token."""

    def __init__(self) -> None:
        self.prepared: list[Request] = []

    async def tokenize(self, ask: TokenizeAsk) -> Any:
        raise AssertionError

    async def detokenize(self, ask: DetokenizeAsk) -> str:
        return "".join(map(chr, ask.token_ids))

    async def prepare(self, request: Request) -> Prepared:
        self.prepared.append(request)
        ids = request.prompt.token_ids or [ord(each) for each in request.prompt.text or ""]
        return Prepared(np.array(ids, np.uint32)[-(request.params.truncate_prompt_tokens or 0) :], 16)


def asked(prompt: Prompt, **params: Any) -> Request:
    return Request(Header(IDS[0], "", 0, 99, 0, "", 0), "m", prompt, SamplingParams(**params))


def told(requests: list[Request], *, echo: bool, ids: bool) -> tuple[ToldPrompt, ...]:
    return asyncio.run(with_prompts(Scripted(), form(returns_token_ids=ids), requests, echo=echo)).prompts


def test_a_form_is_read_as_it_was_kept_and_others_have_no_prompts() -> None:
    whole = form(prompts=PROMPTS, returns_token_ids=True, stream_interval=4)
    assert wire.decode_reply_form(wire.encode_reply_form(whole)) == whole
    assert whole.of_another.prompts == ()


def test_an_echo_is_the_text_as_it_was_given_or_that_of_the_tokens() -> None:
    assert told([asked(Prompt(text="abc"))], echo=True, ids=False) == (ToldPrompt("abc"),)
    assert told([asked(Prompt(token_ids=(97, 98)))], echo=True, ids=False) == (ToldPrompt("ab"),)
    assert told([asked(Prompt(text="abc"), truncate_prompt_tokens=2)], echo=True, ids=False) == (ToldPrompt("bc"),)
    assert told([asked(Prompt(text="ab")), asked(Prompt(text="c"))], echo=False, ids=True) == (
        ToldPrompt("", (97, 98)),
        ToldPrompt("", (99,)),
    )
    assert told([asked(Prompt(text="ab"))], echo=False, ids=False) == ()


def test_a_call_that_is_made_again_has_the_prompt_of_the_first_time() -> None:
    vocabulary = Scripted()
    asyncio.run(with_prompts(vocabulary, form(returns_token_ids=True), [asked(Prompt(text="a"))], echo=False))
    assert [each.header.arrival_ns for each in vocabulary.prepared] == [7]


def test_more_prompt_tokens_than_are_kept_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_prompts, "MAX_TOLD_TOKENS", 3)
    with pytest.raises(PenstockError) as caught:
        told([asked(Prompt(text="ab")), asked(Prompt(text="cd"))], echo=False, ids=True)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARGUMENT, "return_token_ids")


@pytest.mark.parametrize("kind", list(Form))
def test_a_plain_reply_tells_ids_where_vllm_does(kind: Form) -> None:
    reply = Reply(form(kind, prompts=PROMPTS, returns_token_ids=True).head)
    for choice in range(4):
        reply.add(choice, row("x", 7, choice, finish=FinishReason.STOP))
    fields = reply.fields([Usage(), Usage()])
    assert [each["token_ids"] for each in fields["choices"]] == [(7, 0), (7, 1), (7, 2), (7, 3)]
    if kind is Form.CHAT:
        assert fields["prompt_token_ids"] == (1, 2)
        assert fields["choices"][0]["message"]["content"] == "x"
    else:
        assert [each["prompt_token_ids"] for each in fields["choices"]] == [(1, 2), (1, 2), (3,), (3,)]
        assert [each["text"] for each in fields["choices"]] == ["Once x", "Once x", "Twice x", "Twice x"]


def test_who_asks_for_neither_is_told_neither() -> None:
    for kind in Form:
        reply = Reply(form(kind).head)
        for choice in range(4):
            reply.add(choice, row("x", 7, finish=FinishReason.STOP))
        assert "token_ids" not in json.dumps(reply.fields([Usage(), Usage()]))


@pytest.mark.parametrize("returns_token_ids", [False, True])
def test_a_stream_begins_with_the_prompt_and_tells_each_chunks_tokens(returns_token_ids: bool) -> None:
    head = form(prompts=PROMPTS, returns_token_ids=returns_token_ids).head
    sse = SseFormat(head, IDS[0], [DeliveredSequence() for _ in range(4)])
    rows = [row("a", 5), row("", 6, first=1), row("b", 7, first=2, finish=FinishReason.LENGTH)]
    told = [each for part in rows for each in events(sse.chunk(3, part, 0))]
    assert "".join(each["choices"][0]["text"] for each in told) == "Twice ab"
    assert told[0]["choices"][0]["text"] == "Twice a"
    if returns_token_ids:
        assert [each["choices"][0]["token_ids"] for each in told] == [[5], [6], [7]]
        assert [each["choices"][0].get("prompt_token_ids") for each in told] == [[3], None, None]


def test_a_streamed_chat_tells_the_prompts_tokens_with_its_role() -> None:
    head = form(Form.CHAT, prompts=PROMPTS, returns_token_ids=True).head
    sse = SseFormat(head, IDS[0], [DeliveredSequence() for _ in range(4)])
    first, second = events(sse.chunk(0, row("a", 5), 0))
    assert first["prompt_token_ids"] == [1, 2]
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert "prompt_token_ids" not in second
    assert second["choices"][0]["token_ids"] == [5]


def test_ids_of_events_do_not_count_the_prompt_and_who_comes_back_is_not_told_it_again() -> None:
    plain, echoing = form(), form(prompts=PROMPTS, returns_token_ids=True)
    nothing = [DeliveredSequence() for _ in range(4)]
    ids = [
        SseFormat(each.head, IDS[0], nothing, with_ids=True).chunk(0, row("a", 5), 9).decode().splitlines()[0]
        for each in (plain, echoing)
    ]
    assert ids[0] == ids[1]
    back = [replace(each, num_tokens=1, num_chars=1) for each in nothing]
    (event,) = events(SseFormat(echoing.head, IDS[0], back).chunk(0, row("b", 6, first=1), 9))
    assert (event["choices"][0]["text"], event["choices"][0]["token_ids"]) == ("b", [6])
    assert "prompt_token_ids" not in event["choices"][0]


def test_bodies_say_it_by_vllms_names() -> None:
    ask = parse_completion(b'{"prompt": "x", "echo": true, "return_token_ids": true, "stream_interval": 8}')
    assert (ask.echo, ask.returns_token_ids, ask.stream_interval) == (True, True, 8)
    chat = parse_chat(b'{"messages": [{"role": "user", "content": "x"}], "return_token_ids": true}')
    assert (chat.echo, chat.returns_token_ids, chat.stream_interval) == (False, True, 0)
    for interval in (0, -1, 1025):
        with pytest.raises(PenstockError) as caught:
            parse_completion(b'{"prompt": "x", "stream_interval": %d}' % interval)
        assert caught.value.param == "stream_interval"
    with pytest.raises(PenstockError) as caught:
        parse_chat(b'{"messages": [{"role": "user", "content": "x"}], "echo": true}')
    assert caught.value.param == "echo"


def test_spaces_between_special_tokens_are_left_out_only_where_these_have_no_text() -> None:
    assert parse_completion(b'{"prompt": "x", "spaces_between_special_tokens": false}').params == SamplingParams()
    assert parse_completion(b'{"prompt": "x", "spaces_between_special_tokens": true, "skip_special_tokens": false}')
    with pytest.raises(PenstockError) as caught:
        parse_completion(b'{"prompt": "x", "spaces_between_special_tokens": false, "skip_special_tokens": false}')
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNIMPLEMENTED, "spaces_between_special_tokens")
