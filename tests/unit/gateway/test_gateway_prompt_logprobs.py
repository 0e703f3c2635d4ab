"""Logprobs of prompts at the gateway: told as vLLM tells them, before the rows that they belong to, or not at all."""

import asyncio
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.finish import FinishReason, Usage
from contract.domain.plan import Logprobs, PromptLogprobs
from contract.domain.rows import TextRow, TokenLogprob
from contract.wire.tokens import encode_prompt_logprobs
from gateway_svc import prompt_outputs as module
from gateway_svc.core.openai import Form, parse_chat, parse_completion
from gateway_svc.core.prompt_logprobs import SpelledPrompt
from gateway_svc.core.replies import Reply, ReplyHead, ToldPrompt
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.sse import SseFormat
from gateway_svc.core.streams import DeliveredSequence
from gateway_svc.prompt_outputs import PromptOutputsSink, prompt_reader, with_prompt_outputs
from gateway_svc.wire.prompt_outputs import decode_prompt_logprobs, prompt_events
from penstock.client.wire import PromptPart, decode_event

PIECES = {1: b"He", 5: b"\xe9", 6: b"\x9b\xaa", 7: b"!", 8: b"?"}


def prompt_of(num_top: int = 2) -> PromptLogprobs:
    """Of the prompt 1, 5, 6, 7, whose second character is two tokens long."""
    logprobs = Logprobs(
        np.array([-1.0, -2.0, -np.inf], np.float32),
        np.array([2, 1, 9], np.uint32),
        np.full(3, num_top, np.uint32),
        np.array([[7, 5], [6, 7], [7, 8]], np.uint32)[:, :num_top].ravel(),
        np.array([[-0.5, -1.0], [-2.0, -2.5], [-0.25, -3.0]], np.float32)[:, :num_top].ravel(),
    )
    return PromptLogprobs(np.array([5, 6, 7], np.uint32), logprobs)


def spelled(num_top: int = 2) -> SpelledPrompt:
    return SpelledPrompt(1, prompt_of(num_top), PIECES)


def test_every_token_but_the_first_has_an_object_by_token() -> None:
    assert spelled().by_token == [
        None,
        {
            "5": {"logprob": -1.0, "rank": 2, "decoded_token": "\ufffd"},
            "7": {"logprob": -0.5, "rank": 1, "decoded_token": "!"},
        },
        {
            "6": {"logprob": -2.0, "rank": 1, "decoded_token": "\ufffd\ufffd"},
            "7": {"logprob": -2.5, "rank": 2, "decoded_token": "!"},
        },
        {
            "7": {"logprob": -9999.0, "rank": 9, "decoded_token": "!"},
            "8": {"logprob": -3.0, "rank": 2, "decoded_token": "?"},
        },
    ]
    assert spelled(0).by_token[1:] == [dict([next(iter(each.items()))]) for each in spelled().by_token[1:] if each]


def test_the_tokens_to_be_spelled_are_all_that_occur_once() -> None:
    assert SpelledPrompt.tokens(prompt_of(), 1).tolist() == [1, 5, 6, 7, 8]
    assert SpelledPrompt.tokens(prompt_of(0), None).tolist() == [5, 6, 7]


def test_columns_begin_with_null_and_count_characters_that_are_complete() -> None:
    columns = spelled(1).columns(as_ids=False)
    assert columns["tokens"] == ["He", "bytes:\\xe9", "bytes:\\x9b\\xaa", "!"]
    assert columns["token_logprobs"] == [None, -1.0, -2.0, -9999.0]
    assert columns["text_offset"] == [0, 2, 2, 3]
    assert columns["top_logprobs"][:2] == [None, {"bytes:\\xe9": -1.0, "!": -0.5}]
    assert spelled(1).columns(as_ids=True)["tokens"] == [f"token_id:{each}" for each in (1, 5, 6, 7)]


def test_what_is_no_text_takes_the_characters_that_it_is_shown_as() -> None:
    prompt = SpelledPrompt(7, prompt_of(0), PIECES | {7: b"\xff", 5: b"a"})
    assert prompt.text_offsets == [0, 1, 2, 4]


def test_grpc_clients_get_parts_that_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway_svc.wire.prompt_outputs._EVENT_TOKENS", 2)
    told = SpelledPrompt(None, decode_prompt_logprobs(encode_prompt_logprobs(prompt_of()).SerializeToString()), PIECES)
    events = [decode_event(each) for each in prompt_events(0, told)]
    assert [each.position for each in events if isinstance(each, PromptPart)] == [1, 3]
    entries = [entry for each in events if isinstance(each, PromptPart) for entry in each.logprobs]
    assert [list(entry) for entry in entries] == [[5, 7], [6, 7], [7, 8]]
    assert [entry[7].decoded_token for entry in entries] == ["!", "!", "!"]
    assert [next(iter(entry.values())).rank for entry in entries] == [2, 1, 9]


def test_what_a_worker_did_not_write_is_an_error() -> None:
    with pytest.raises(PenstockError) as caught:
        decode_prompt_logprobs(encode_prompt_logprobs(prompt_of()).SerializeToString()[:-3])
    assert caught.value.code is ErrorCode.INTERNAL


# --- bodies -----------------------------------------------------------------------------------------------------------


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "x"} | fields).encode()


def test_echo_asks_for_the_logprobs_of_the_prompt_that_it_tells() -> None:
    ask = parse_completion(completion(echo=True, logprobs=3))
    assert (ask.params.prompt_logprobs, ask.wants_prompt_logprobs, ask.echo) == (3, False, True)
    ask = parse_completion(completion(echo=True, logprobs=3, prompt_logprobs=0))
    assert (ask.params.prompt_logprobs, ask.wants_prompt_logprobs) == (0, True)
    assert parse_completion(completion(echo=True)).params.prompt_logprobs is None
    assert parse_completion(completion(logprobs=3)).params.prompt_logprobs is None


def test_no_tokens_may_be_asked_for_where_the_prompt_is_told() -> None:
    ask = parse_completion(completion(echo=True, max_tokens=0))
    assert (ask.params.max_tokens, ask.without_output) == (1, True)
    assert not parse_completion(completion(echo=True, max_tokens=1)).without_output


def test_a_chat_may_ask_too() -> None:
    ask = parse_chat(json.dumps({"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 20}).encode())
    assert (ask.params.prompt_logprobs, ask.wants_prompt_logprobs) == (20, True)


# --- replies ----------------------------------------------------------------------------------------------------------


def row(token: int, text: str, finish: FinishReason = FinishReason.UNSPECIFIED) -> TextRow:
    logprobs = (TokenLogprob(token, -0.5, token_bytes=text.encode(), text_offset=0),)
    return TextRow(b"r" * 16, 0, 0, 0, 0, (token,), text, logprobs, finish=finish, usage=Usage(4, 1))


def head(form: Form = Form.COMPLETION, **fields: Any) -> ReplyHead:
    return ReplyHead(form, "id", "m", 0, 1, **fields)


ECHO = {"wants_logprobs": True, "echoes_logprobs": True, "prompts": (ToldPrompt("He雪!", (1, 5, 6, 7)),)}


def reply_of(of: ReplyHead) -> dict[str, Any]:
    reply = Reply(of)
    reply.learn_prompt([0], spelled(1))
    reply.add(0, row(8, "?", FinishReason.STOP))
    fields: dict[str, Any] = json.loads(json.dumps(reply.fields([Usage(4, 1)])))
    return fields


def test_an_echo_has_the_prompts_logprobs_before_those_of_the_output() -> None:
    (choice,) = reply_of(head(**ECHO))["choices"]
    assert choice["text"] == "He雪!?"
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -9999.0, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 2, 2, 3, 4]
    assert choice["prompt_logprobs"] is None


def test_of_the_prompt_alone_nothing_of_the_output_is_told_or_counted() -> None:
    reply = reply_of(head(**ECHO, without_output=True))
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("He雪!", "length", None)
    assert choice["logprobs"]["tokens"][-1] == "!"
    assert (reply["usage"]["completion_tokens"], reply["usage"]["total_tokens"]) == (0, 4)


@pytest.mark.parametrize("form", Form)
def test_a_reply_has_them_where_vllm_has_them(form: Form) -> None:
    reply = reply_of(head(form, wants_prompt_logprobs=True))
    place = reply if form is Form.CHAT else reply["choices"][0]
    assert place["prompt_logprobs"] == spelled(1).by_token


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("fields", [{"wants_prompt_logprobs": True}, ECHO, ECHO | {"without_output": True}])
def test_a_streams_first_chunk_has_them_and_no_other(form: Form, fields: dict[str, Any]) -> None:
    if form is Form.CHAT and "prompts" in fields:
        return
    sse = SseFormat(head(form, **fields), b"r" * 16, [DeliveredSequence()])
    sse.learn_prompt([0], spelled(1))
    written = sse.chunk(0, row(7, "!"), 1) + sse.chunk(0, row(8, "?", FinishReason.STOP), 2)
    chunks = [json.loads(each.removeprefix(b"data: ")) for each in written.split(b"\n\n") if each]
    of_prompt = [each.get("prompt_logprobs") or each["choices"][0].get("prompt_logprobs") for each in chunks]
    assert of_prompt[0] == (spelled(1).by_token if "wants_prompt_logprobs" in fields else None)
    assert not any(of_prompt[1:])
    if "prompts" in fields:
        told = [each["choices"][0] for each in chunks]
        without = fields.get("without_output")
        assert "".join(each["text"] for each in told) == ("He雪!" if without else "He雪!!?")
        assert told[0]["logprobs"]["tokens"] == [
            "He",
            "bytes:\\xe9",
            "bytes:\\x9b\\xaa",
            "!",
            *([] if without else "!"),
        ]
        assert told[-1]["finish_reason"] == ("length" if without else "stop")
        assert (told[-1]["logprobs"] is None) == bool(without)


# --- on their way -----------------------------------------------------------------------------------------------------


class Kept:
    """A sink that keeps what it is told, in order."""

    has_room = True

    def __init__(self) -> None:
        self.told: list[Any] = []

    def learn(self, prompt: int, num_prompt_tokens: int) -> None:
        self.told.append(("learn", prompt, num_prompt_tokens))

    def learn_model(self, prompt: int, model_digest: bytes) -> None:
        self.told.append(("model", prompt, model_digest))

    def learn_prompt(self, prompt: int, logprobs: SpelledPrompt) -> None:
        self.told.append(("prompt", prompt, logprobs.first))

    def recall(self, prompt: int, row: TextRow) -> None:
        self.told.append(("recall", prompt, row.text))

    def take(self, prompt: int, row: TextRow, chain: int) -> None:
        self.told.append(("take", prompt, row.text, chain))

    def end(self, usages: Sequence[Usage]) -> None:
        self.told.append(("end", len(usages)))

    def fail(self, error: PenstockError) -> None:
        self.told.append(("fail", error.code))


class Store:
    """Where logprobs are read; each of what it is told stands for one reading."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[int, bytes]] = []

    async def read(self, prompt: int, model_digest: bytes) -> SpelledPrompt | None:
        self.asked.append((prompt, model_digest))
        await asyncio.sleep(0)
        return spelled() if self.answers.pop(0) else None


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)


def run(store: Store, script: Callable[[PromptOutputsSink], None], known: Sequence[bool] = (False,)) -> list[Any]:
    async def go() -> list[Any]:
        kept = Kept()
        sink = PromptOutputsSink(kept, 1, store.read, known)
        script(sink)
        for _ in range(20):
            await asyncio.sleep(0)
        return kept.told

    return asyncio.run(go())


def test_rows_wait_for_the_logprobs_of_their_prompt() -> None:
    def script(sink: PromptOutputsSink) -> None:
        sink.learn_model(0, b"m")
        sink.take(0, row(1, "a"), 11)
        sink.take(0, row(2, "b", FinishReason.LENGTH), 12)
        sink.end([Usage()])

    store = Store(True)
    expected = [("model", 0, b"m"), ("prompt", 0, 1), ("take", 0, "a", 11), ("take", 0, "b", 12), ("end", 1)]
    assert run(store, script) == expected
    assert store.asked == [(0, b"m")]


def test_each_prompt_waits_for_its_own_and_what_a_client_has_for_nothing() -> None:
    def script(sink: PromptOutputsSink) -> None:
        for prompt in range(2):
            sink.take(prompt, row(prompt, "a"), 7)

    store = Store(True)
    assert run(store, script, (True, False)) == [("take", 0, "a", 7), ("prompt", 1, 1), ("take", 1, "a", 7)]
    assert store.asked == [(1, b"")]


def test_what_is_missing_is_read_again_while_the_request_goes_on() -> None:
    def script(sink: PromptOutputsSink) -> None:
        sink.take(0, row(1, "a"), 1)

    assert run(Store(False, False, True), script) == [("prompt", 0, 1), ("take", 0, "a", 1)]


def test_what_is_lost_when_the_output_has_ended_is_told() -> None:
    def script(sink: PromptOutputsSink) -> None:
        sink.take(0, row(1, "a", FinishReason.STOP), 1)
        sink.end([Usage()])

    assert run(Store(False), script) == [("fail", ErrorCode.UNAVAILABLE)]


def test_an_error_of_the_request_is_told_at_once_and_nothing_after_it() -> None:
    def script(sink: PromptOutputsSink) -> None:
        sink.take(0, row(1, "a"), 1)
        sink.fail(PenstockError(ErrorCode.CANCELLED, "cancelled"))
        sink.take(0, row(2, "b"), 2)

    assert run(Store(True), script) == [("fail", ErrorCode.CANCELLED)]


def test_only_calls_that_tell_them_wait() -> None:
    form = ReplyForm((b"r" * 16,), 2, Form.COMPLETION, "m", 0, 0, 0)
    kept, store = Kept(), Store()
    assert with_prompt_outputs(kept, form, store.read) is kept
    asked = ReplyForm((b"r" * 16,), 2, Form.COMPLETION, "m", 0, 0, 0, wants_prompt_logprobs=True)
    begun = [DeliveredSequence(num_tokens=1), DeliveredSequence()]
    for have, known in ((None, False), (begun, False), ([begun[0]] * 2, True)):
        sink = with_prompt_outputs(kept, asked, store.read, have)
        assert isinstance(sink, PromptOutputsSink)
        assert sink._known == [known]


class Vocabulary:
    """Tells what tokens are made of, after as many errors as it is given."""

    def __init__(self, *errors: PenstockError) -> None:
        self.errors = list(errors)

    async def spell(self, token_ids: Sequence[int]) -> list[bytes]:
        if self.errors:
            raise self.errors.pop(0)
        return [PIECES[each] for each in token_ids]


def read_with(vocabulary: Vocabulary) -> Any:
    """Read the outputs of a prompt, as a call does."""

    async def read_prompt_output(request_id: bytes, model_digest: bytes) -> bytes:
        assert (request_id, model_digest) == (b"r" * 16, b"m")
        return encode_prompt_logprobs(prompt_of()).SerializeToString()

    outbox = SimpleNamespace(read_prompt_output=read_prompt_output)
    delivery: Any = SimpleNamespace(find=lambda _: None, outbox=outbox)
    form = ReplyForm(
        request_ids=(b"r" * 16,),
        n=1,
        form=Form.COMPLETION,
        model="m",
        arrival_ns=7,
        deadline_ns=0,
        seed=1,
        prompts=(ToldPrompt("", (1, 5, 6, 7)),),
    )
    read = prompt_reader(delivery, vocabulary, form)  # type: ignore[arg-type]
    return asyncio.run(read(0, b"m"))  # type: ignore[arg-type]


def test_a_call_that_has_begun_waits_for_a_tokenizer() -> None:
    nobody = PenstockError(ErrorCode.UNAVAILABLE, "none lives")
    assert read_with(Vocabulary(nobody, nobody)).by_token == spelled().by_token


def test_an_error_that_no_waiting_mends_ends_the_call() -> None:
    with pytest.raises(PenstockError, match="a token") as caught:
        read_with(Vocabulary(PenstockError(ErrorCode.INTERNAL, "beyond: a token")))
    assert caught.value.code is ErrorCode.INTERNAL
