"""All five services on a bus in memory: what a client asks for comes out, and nothing is left behind."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import structlog
from in_memory import Pipeline, wait_until

from contract.domain import chain
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import SamplingParams
from penstock.client import Accepted, Delta, Generation
from worker_svc.core.interface import Limits
from worker_svc.core.pretended_model import expected_tokens

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> Iterator[Pipeline]:
    worker = {"runner": "simulated", "step_ms": 1.0, "block_size": 4, "num_blocks": 400, "max_num_seqs": 32}
    every = {"session_ttl_s": 6.0}  # so that services tell their state each second
    with Pipeline(checkpoint, worker=worker, every=every) as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def slow_pipeline(checkpoint: Path) -> Iterator[Pipeline]:
    """Its answers do not end while a test does something, however slow the machine is."""
    worker = {"runner": "simulated", "step_ms": 500.0, "block_size": 4, "num_blocks": 400, "max_num_seqs": 32}
    with Pipeline(checkpoint, worker=worker) as pipeline:
        yield pipeline


def expected(prompt: list[int], count: int, params: SamplingParams = GREEDY, seed: int = 0) -> list[int]:
    limits = Limits(0, 0, 0, 0, 0, vocab_size=257, eos_token_ids=(256,))
    return list(islice(expected_tokens(prompt, params.sampling, seed, limits), count))


def used_blocks(pipeline: Pipeline) -> int:
    """Of the worker, once it is paired."""
    wait_until(lambda: "worker" in pipeline.scheduler.stats().workers)
    return pipeline.scheduler.stats().workers["worker"].num_used_blocks


def test_many_at_once_get_the_tokens_of_each_alone(pipeline: Pipeline) -> None:
    prompts = [[(7 * i + j) % 256 for j in range(1 + 13 * i % 90)] for i in range(24)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        generations: list[Generation] = list(pool.map(lambda p: pipeline.client.complete(p, GREEDY), prompts))
    for prompt, generation in zip(prompts, generations, strict=True):
        assert generation.outputs[0].token_ids == expected(prompt, 12)
        assert generation.outputs[0].finish_reason == "length"
        assert generation.usage is not None
        assert (generation.usage.num_prompt_tokens, generation.usage.num_output_tokens) == (len(prompt), 12)
    wait_until(lambda: used_blocks(pipeline) == 0)


def test_seeded_samples_are_those_of_requests_with_the_derived_seeds(pipeline: Pipeline) -> None:
    params = SamplingParams(n=3, seed=41, max_tokens=10)
    generation = pipeline.client.complete([9, 8, 7], params)
    assert generation.accepted.seed == 41
    for output in generation.outputs:
        assert output.token_ids == expected([9, 8, 7], 10, params, chain.sequence_seed(41, output.index))


@pytest.mark.parametrize("state", [{}, {"simulated_state": True}, {"simulated_state": True, "num_saved_states": 0}])
def test_a_preempted_request_is_delivered_as_if_nothing_had_happened(checkpoint: Path, state: dict[str, Any]) -> None:
    worker = {"runner": "simulated", "step_ms": 1.0, "block_size": 4, "num_blocks": 60, "max_num_seqs": 32, **state}
    prompts = [[i, *range(40 + i)] for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=60)
    saving = {"min_saved_tokens": 8}
    with Pipeline(checkpoint, worker=worker, scheduler=saving) as small, ThreadPoolExecutor(len(prompts)) as pool:
        generations = list(pool.map(lambda prompt: small.client.complete(prompt, params), prompts))
        assert small.scheduler.stats().counters.num_preemptions > 0
    for prompt, generation in zip(prompts, generations, strict=True):
        assert generation.outputs[0].token_ids == expected(prompt, 60)


def test_prompts_go_on_from_states_that_others_have_saved(checkpoint: Path) -> None:
    """The second finds blocks without a state where they end, and leaves one there; each leaves one at its own end."""
    worker = {"runner": "simulated", "step_ms": 0.0, "block_size": 4, "simulated_state": True, "num_saved_states": 4}
    shared, found = list(range(3, 43)), []
    with Pipeline(checkpoint, worker=worker, scheduler={"min_saved_tokens": 8}) as saving:
        for turn in ([7] * 20, [8] * 20, [9] * 20, [9] * 26, [9] * 40):
            generation = saving.client.complete([*shared, *turn], GREEDY)
            assert generation.outputs[0].token_ids == expected([*shared, *turn], 12)
            assert generation.usage is not None
            found.append(generation.usage.num_cached_tokens)
    assert found == [0, 0, 40, 56, 64]


def test_a_stop_string_ends_the_text_and_its_sequence(pipeline: Pipeline) -> None:
    text = pipeline.client.complete([5, 6], GREEDY).text
    params = SamplingParams(temperature=0, max_tokens=400, stop=text[3:6])
    output = pipeline.client.complete([5, 6], params).outputs[0]
    assert output.text == text[: text.index(text[3:6])]
    assert (output.finish_reason, output.stop_reason) == ("stop", text[3:6])
    wait_until(lambda: used_blocks(pipeline) == 0)


def test_deltas_extend_each_other_and_the_last_one_tells_the_usage(pipeline: Pipeline) -> None:
    events = list(pipeline.client.generate([1, 2, 3, 4], GREEDY))
    assert isinstance(events[0], Accepted)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert len(deltas) == len(events) - 1
    tokens: list[int] = []
    for delta in deltas:
        tokens.extend(delta.token_ids)
    assert tokens == expected([1, 2, 3, 4], 12)
    assert [delta.usage is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_a_client_that_leaves_frees_its_blocks(slow_pipeline: Pipeline) -> None:
    events = slow_pipeline.client.generate([3, 1, 4], SamplingParams(temperature=0, max_tokens=500))
    assert [type(next(events)) for _ in range(5)] == [Accepted, Delta, Delta, Delta, Delta]
    assert used_blocks(slow_pipeline) > 0
    events.close()
    wait_until(lambda: used_blocks(slow_pipeline) == 0 and not slow_pipeline.scheduler.stats().num_requests)


def test_a_deadline_ends_a_request_with_its_error(slow_pipeline: Pipeline) -> None:
    with pytest.raises(PenstockError) as raised:
        slow_pipeline.client.complete([3, 1, 4], SamplingParams(temperature=0, max_tokens=500), timeout_s=0.1)
    assert raised.value.code is ErrorCode.DEADLINE_EXCEEDED
    wait_until(lambda: used_blocks(slow_pipeline) == 0)


@pytest.mark.parametrize(
    ("prompt", "params", "code"),
    [
        ("", GREEDY, ErrorCode.INVALID_ARGUMENT),
        ([], GREEDY, ErrorCode.INVALID_ARGUMENT),
        ([257], GREEDY, ErrorCode.INVALID_ARGUMENT),
        ([1] * 512, GREEDY, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        ([1], SamplingParams(max_tokens=512), ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        ([1], SamplingParams(stop_token_ids=[300]), ErrorCode.INVALID_ARGUMENT),
    ],
)
def test_a_wrong_request_ends_with_its_error_and_the_next_one_is_served(
    pipeline: Pipeline, prompt: str | list[int], params: SamplingParams, code: ErrorCode
) -> None:
    with pytest.raises(PenstockError) as raised:
        pipeline.client.complete(prompt, params)
    assert raised.value.code is code
    assert pipeline.client.complete([1], GREEDY).outputs[0].token_ids == expected([1], 12)


def test_a_request_can_be_followed_by_its_id_through_the_logs_of_all_services(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with structlog.testing.capture_logs() as lines:
        accepted = pipeline.client.complete([1, 2], GREEDY).accepted
        with pytest.raises(PenstockError):
            pipeline.client.complete([257], GREEDY)

        def events() -> list[str]:
            return [line["event"] for line in lines if line.get("request_id") == accepted.request_id]

        wait_until(lambda: "served" in events())
        assert events() == ["request", "tokenized", "queued", "admitted", "begun", "retired", "served"]
        rejected = [line for line in lines if line["event"] == "rejected"]
    assert [line["log_level"] for line in rejected] == ["debug"]
    assert "257" in rejected[0]["reason"]
    assert rejected[0]["request_id"] != accepted.request_id


def test_the_pipeline_shows_all_services_and_their_hops(pipeline: Pipeline) -> None:
    def are_shown() -> bool:
        pipeline.client.complete([1], GREEDY)  # again: a rate is of the last seconds
        sessions = pipeline.client.pipeline().sessions
        hops = {hop.hop for each in sessions for hop in each.status.hops if hop.rate}
        return hops >= {"prompts", "requests", "steps", "results", "tokens", "text"}

    wait_until(are_shown)
    kinds = {session.kind for session in pipeline.client.pipeline().sessions}
    assert kinds == {"gateway", "tokenizer", "scheduler", "worker", "detokenizer"}
