"""Replies with prompts, ids of tokens and groups of them: a gateway killed in mid-stream is noticed in none of it."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import pytest
from byte_tokenizer import CHAT_TEMPLATE
from served import CALM_LEASES, SIMULATED, TWO_GATEWAYS, Served, expected, is_ready, is_running, wait_until

from contract.domain.finish import FinishReason
from contract.domain.params import SamplingParams
from penstock.client import Accepted, Client, Delta

NUM_TOKENS = 120
INTERVAL = 8
PROMPT = "Once"
PROMPT_IDS = [ord(each) - ord("!") for each in PROMPT]  # the byte tokenizer's alphabet begins there
BODY = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
TOLD = {"echo": True, "return_token_ids": True, "stream_interval": INTERVAL, "resumable": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = (f"--model={checkpoint}", "--served-model-name=simulated", *TWO_GATEWAYS, "--step-ms=5", *SIMULATED)
    with Served(tmp_path_factory.mktemp("told"), *flags, CALM_LEASES, "--trust-request-chat-template") as served:
        yield served.wait_ready()


@pytest.fixture
def kill(served: Served) -> Iterator[Callable[[], None]]:
    """Kills gateway-0; the launcher has started it again when the test is over."""
    pid = served.pids()["gateway-0"]

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid), "dead")

    yield kill
    wait_until(lambda: served.pids()["gateway-0"] != pid, "restarted")
    wait_until(lambda: is_ready(served.http_urls[0]), "ready")


def choices(reply: httpx.Response, most: int | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The first choice of each event, with the event's id."""
    assert reply.status_code == 200, reply.read()
    event_id = ""
    for line in reply.iter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "data" and value != "[DONE]":
            yield event_id, json.loads(value)["choices"][0]
            if most is not None and (most := most - 1) == 0:
                return


def check_groups(parts: Sequence[Sequence[int]]) -> None:
    """Each part but the last ends in a group of its own. A row of several tokens, on a slow machine, may end later."""
    ends = list(accumulate(map(len, parts)))[:-1]
    groups = [1 + (each - 1) // INTERVAL for each in ends]
    assert groups == sorted(set(groups))


def test_a_stream_goes_on_through_another_gateway_with_all_that_was_asked_for(
    served: Served, kill: Callable[[], None]
) -> None:
    urls = served.http_urls
    with httpx.stream("POST", f"{urls[0]}/v1/completions", json=BODY | TOLD, timeout=300) as reply:
        request_id = reply.headers["x-penstock-request-id"]
        ids, told = zip(*choices(reply, most=3), strict=True)
    kill()
    events, back = f"{urls[1]}/v1/requests/{request_id}/events", {"last-event-id": ids[-1]}
    with httpx.stream("GET", events, headers=back, timeout=300) as reply:
        heard = [*told, *(choice for _, choice in choices(reply))]
    token_ids = [each["token_ids"] for each in heard]
    assert [token for ids in token_ids for token in ids] == expected(PROMPT_IDS, NUM_TOKENS)
    assert [each.get("prompt_token_ids") for each in heard] == [PROMPT_IDS, *[None] * (len(heard) - 1)]
    assert heard[-1]["finish_reason"] == "length"
    check_groups(token_ids)
    text = "".join(each["text"] for each in heard)
    plain = httpx.post(
        f"{urls[1]}/v1/completions", json=BODY | {"stream": False, "echo": True, "return_token_ids": True}, timeout=300
    ).json()["choices"][0]
    assert text == plain["text"]
    assert text.startswith(PROMPT)
    assert (plain["prompt_token_ids"], plain["token_ids"]) == (PROMPT_IDS, expected(PROMPT_IDS, NUM_TOKENS))
    kept = httpx.get(f"{urls[1]}/v1/requests/{request_id}", timeout=300).json()["reply"]["choices"][0]
    assert (kept["text"], kept["prompt_token_ids"], kept["token_ids"]) == (
        text,
        PROMPT_IDS,
        plain["token_ids"],
    )


def test_a_grpc_call_goes_on_through_another_gateway_in_the_same_groups(
    served: Served, kill: Callable[[], None]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    deltas: list[Delta] = []
    is_killed = False
    with Client(",".join(served.grpc_addresses)) as client:
        while not is_killed:  # a gateway that stood still has the whole stream at once: then it is not killed in it
            deltas.clear()
            calls = client.generate(
                PROMPT, params, resumable=True, stream_interval=INTERVAL, return_prompt_token_ids=True, timeout_s=900
            )
            for event in calls:
                if isinstance(event, Accepted):
                    assert event.prompt_token_ids == tuple(PROMPT_IDS)
                    continue
                deltas.append(event)
                if len(deltas) == 3 and event.finish is FinishReason.UNSPECIFIED:
                    kill()
                    is_killed = True
            assert [token for each in deltas for token in each.token_ids] == expected(PROMPT_IDS, NUM_TOKENS)
            check_groups([each.token_ids for each in deltas])


def test_an_echo_of_tokens_is_their_text_and_one_of_several_prompts_their_own(served: Served) -> None:
    body = {"prompt": [PROMPT_IDS, [*PROMPT_IDS, *PROMPT_IDS]], "max_tokens": 2, "temperature": 0, "echo": True}
    replies = httpx.post(f"{served.http_urls[1]}/v1/completions", json=body, timeout=300).json()["choices"]
    assert [each["text"][: 4 * (1 + each["index"])] for each in replies] == [PROMPT, PROMPT + PROMPT]


def test_a_chat_may_bring_its_template_where_it_is_trusted(served: Served, simulated: Served) -> None:
    url = f"{served.http_urls[1]}/v1/chat/completions"
    body = CHAT | {"max_tokens": 4, "return_token_ids": True, "temperature": 0}
    ours = httpx.post(url, json=body | {"chat_template": CHAT_TEMPLATE}, timeout=300).json()
    assert ours["prompt_token_ids"] == httpx.post(url, json=body, timeout=300).json()["prompt_token_ids"]
    other = httpx.post(url, json=body | {"chat_template": "{{ messages[0].content }}!"}, timeout=300).json()
    detokenized = httpx.post(
        f"{served.http_urls[1]}/detokenize", json={"tokens": other["prompt_token_ids"]}, timeout=300
    )
    assert detokenized.json()["prompt"] == "hi!"
    refused = httpx.post(
        f"{simulated.http_url}/v1/chat/completions", json=body | {"chat_template": CHAT_TEMPLATE}, timeout=300
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template"
    assert "--trust-request-chat-template" in refused.json()["error"]["message"]


def test_a_prompt_is_cut_at_the_side_that_is_said(served: Served) -> None:
    body = BODY | {"stream": False, "max_tokens": 1, "truncate_prompt_tokens": 2, "return_token_ids": True}
    for side, kept in (("right", PROMPT_IDS[:2]), ("left", PROMPT_IDS[-2:])):
        reply = httpx.post(
            f"{served.http_urls[1]}/v1/completions", json=body | {"truncation_side": side}, timeout=300
        ).json()
        assert reply["choices"][0]["prompt_token_ids"] == kept
        assert reply["usage"]["prompt_tokens"] == 2
