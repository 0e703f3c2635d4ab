"""Beam search through all services: over HTTP, plain and streamed, and gRPC, beside answers."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from in_memory import Pipeline, wait_until

from bench.rig.expected_beams import expected_beams, expected_outputs
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import SamplingParams
from worker_svc.core.interface import Limits

LIMITS = Limits(0, 0, 0, 0, 0, vocab_size=257, eos_token_ids=(256,))
EOS_EVERY = 9
PROMPTS = [tuple((7 * i + j) % 256 for j in range(1 + 13 * i % 40)) for i in range(8)]


@pytest.fixture(scope="module", params=[False, True], ids=["", "states"])
def pipeline(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    worker = {"runner": "simulated", "step_ms": 1.0, "block_size": 4, "num_blocks": 300, "max_num_seqs": 16}
    more = {"eos_every": EOS_EVERY, "simulated_state": request.param}
    with Pipeline(checkpoint, worker={**worker, **more}) as pipeline:
        yield pipeline


def params_of(index: int) -> SamplingParams:
    return SamplingParams(
        n=1 + index % 4,
        temperature=0,
        use_beam_search=True,
        length_penalty=(0.5, 1.0, 2.0)[index % 3],
        early_stopping=(False, True, "never")[index % 3],
        max_tokens=15,
        min_tokens=3 * (index % 2),
    )


def wanted(prompt: Sequence[int], params: SamplingParams) -> list[list[int]]:
    return expected_beams(tuple(prompt), params, LIMITS, EOS_EVERY)


def body_of(prompt: Sequence[int], params: SamplingParams, **more: Any) -> dict[str, Any]:
    names = ("n", "use_beam_search", "length_penalty", "early_stopping", "max_tokens", "min_tokens")
    return {"prompt": list(prompt), "return_token_ids": True, **{name: getattr(params, name) for name in names}, **more}


def post(pipeline: Pipeline, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"http://127.0.0.1:{pipeline.gateway.http_port}/v1/completions", json=body, timeout=300)


def test_outputs_come_best_first_and_are_those_of_a_search_alone(pipeline: Pipeline) -> None:
    asked = [(prompt, params_of(index)) for index, prompt in enumerate(PROMPTS)]
    with ThreadPoolExecutor(len(asked)) as pool:
        replies = list(pool.map(lambda each: post(pipeline, body_of(*each)), asked))
    for (prompt, params), reply in zip(asked, replies, strict=True):
        assert reply.status_code == 200, reply.text
        outputs = wanted(prompt, params)
        body = reply.json()
        assert [choice["token_ids"] for choice in body["choices"]] == outputs
        reasons = ["stop" if output[-1] == 256 else "length" for output in outputs]
        assert [choice["finish_reason"] for choice in body["choices"]] == reasons
        assert body["usage"]["completion_tokens"] == sum(map(len, outputs))
        assert body["usage"]["prompt_tokens"] == len(prompt)
    wait_until(lambda: pipeline.scheduler.stats().workers["worker"].num_used_blocks == 0)


def test_a_stream_tells_all_at_the_end(pipeline: Pipeline) -> None:
    params = params_of(3)
    body = body_of(PROMPTS[2], params, stream=True)
    with httpx.stream(
        "POST", f"http://127.0.0.1:{pipeline.gateway.http_port}/v1/completions", json=body, timeout=300
    ) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    told: dict[int, list[int]] = {index: [] for index in range(params.n)}
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            told[choice["index"]] += choice.get("token_ids") or []
    assert list(told.values()) == wanted(PROMPTS[2], params)


def test_grpc_has_beams_too(pipeline: Pipeline) -> None:
    params = params_of(6)
    generation = pipeline.client.complete(list(PROMPTS[3]), params)
    assert [output.token_ids for output in generation.outputs] == wanted(PROMPTS[3], params)


def test_over_grpc_outputs_come_with_their_logprobs_also_beside_other_requests(pipeline: Pipeline) -> None:
    params, plain = params_of(7), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(pipeline.client.complete, list(PROMPTS[1]), plain)
        generation = pipeline.client.complete(list(PROMPTS[4]), params)
        assert beside.result().outputs[0].logprobs is None
    outputs = expected_outputs(tuple(PROMPTS[4]), params, LIMITS, EOS_EVERY)
    for told, output in zip(generation.outputs, outputs, strict=True):
        assert told.logprobs is not None
        entries = [(token, entry.logprob, entry.rank) for each in told.logprobs for token, entry in each.items()]
        assert entries == [(*each, None) for each in zip(output.token_ids, output.logprobs, strict=True)]
        assert told.cumulative_logprob == pytest.approx(sum(output.logprobs))


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"logprobs": 2}, "logprobs"),
        ({"stop": "a"}, "stop"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"n": 17}, "n"),
        ({"n": 16, "stop_token_ids": [1, 2, 3, 4]}, "n"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"length_penalty": 9}, "length_penalty"),
        ({"use_beam_search": False, "length_penalty": 0.5}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
    ],
)
def test_what_beams_cannot_have_beside_them_is_refused_by_name(
    pipeline: Pipeline, said: dict[str, Any], param: str
) -> None:
    reply = post(pipeline, {"prompt": [1, 2], "use_beam_search": True, "n": 2, **said})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_grpc_refuses_by_name_too(pipeline: Pipeline) -> None:
    with pytest.raises(PenstockError) as refused:
        pipeline.client.complete([1, 2], SamplingParams(use_beam_search=True, n=16, stop_token_ids=[1, 2, 3, 4]))
    assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID_ARGUMENT, "n")
