"""`LLMEngine` over the simulated runner: what comes out does not depend on company, window, chunks or preemption."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engines import EOS, drain, expected, make_engine, make_limits, run, token_ids

from contract.domain import chain
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import SamplingParams
from contract.domain.plan import StepPlan
from penstock.outputs import RequestOutput
from worker_svc.core.interface import PendingStep
from worker_svc.core.pretended_model import sampled_logprobs

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = [[(7 * i + j) % 256 for j in range(1 + 11 * i % 60)] for i in range(12)]


def as_requests(prompts: list[list[int]], params: SamplingParams) -> dict:
    return {str(i): (prompt, params) for i, prompt in enumerate(prompts)}


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("budget", [16, 256])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_greedy_tokens_are_those_of_a_sequence_alone(window: int, budget: int, enable_prefix_caching: bool) -> None:
    engine = make_engine(
        plans_in_flight=window,
        limits=make_limits(max_num_batched_tokens=budget),
        enable_prefix_caching=enable_prefix_caching,
    )
    outputs = run(engine, as_requests(PROMPTS, GREEDY))
    for index, prompt in enumerate(PROMPTS):
        assert token_ids(outputs[str(index)]) == expected(prompt, 12)
        assert outputs[str(index)].outputs[0].finish_reason == "length"


def test_a_step_that_new_prompts_fill_begins_before_all_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(limits=make_limits(max_num_batched_tokens=16))
    sizes, launch = [], engine.runner.launch

    def remember(plan: StepPlan) -> PendingStep:
        sizes.append(int(plan.num_tokens.sum()))
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", remember)
    prompts = [list(range(10 * i, 10 * i + 10)) for i in range(3)]
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, GREEDY)
        engine.begin()
        assert sizes == ([] if index == 0 else [16])
    outputs = drain(engine)
    assert [token_ids(outputs[str(index)]) for index in range(3)] == [expected(prompt, 12) for prompt in prompts]


def test_a_preempted_sequence_goes_on_as_if_nothing_had_happened() -> None:
    engine = make_engine(limits=make_limits(num_blocks=24))
    outputs = run(engine, as_requests(PROMPTS, GREEDY))
    assert engine.stats().counters.num_preemptions > 0
    for index, prompt in enumerate(PROMPTS):
        assert token_ids(outputs[str(index)]) == expected(prompt, 12)


def test_equal_beginnings_are_computed_once_and_counted() -> None:
    engine = make_engine()
    shared = list(range(40))
    run(engine, {"first": (shared, GREEDY)})
    outputs = run(engine, {"second": ([*shared, 1, 2], GREEDY)})
    assert outputs["second"].num_cached_tokens == 40
    assert token_ids(outputs["second"]) == expected([*shared, 1, 2], 12)


@settings(max_examples=25)
@given(data=st.data())
def test_seeded_samples_do_not_depend_on_anything_else(data: st.DataObject) -> None:
    prompts = data.draw(st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=30), min_size=1, max_size=6))
    seeds = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=len(prompts), max_size=len(prompts)))
    engine = make_engine(
        plans_in_flight=data.draw(st.sampled_from([1, 2, 4])),
        limits=make_limits(
            max_num_batched_tokens=data.draw(st.sampled_from([8, 64])),
            num_blocks=data.draw(st.sampled_from([11, 16, 200])),
        ),
    )
    outputs = run(
        engine,
        {
            str(i): (prompt, SamplingParams(seed=seed, max_tokens=10))
            for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        },
    )
    for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        assert token_ids(outputs[str(index)]) == expected(prompt, 10, SamplingParams(), seed % 2**64)


def test_n_samples_are_n_requests_with_the_derived_seeds() -> None:
    samples = run(make_engine(), {"a": (PROMPTS[5], SamplingParams(n=4, seed=99, max_tokens=8))})["a"]
    assert [output.index for output in samples.outputs] == [0, 1, 2, 3]
    for index in range(4):
        seed = chain.sequence_seed(99, index)
        seed = seed - 2**64 if seed >= 2**63 else seed
        alone = run(make_engine(), {"a": (PROMPTS[5], SamplingParams(seed=seed, max_tokens=8))})["a"]
        assert token_ids(samples, index) == token_ids(alone)
    assert samples.usage is not None
    assert samples.usage.num_output_tokens == 32


def test_requests_without_a_seed_differ_and_repeat_with_the_engines_seed() -> None:
    params = SamplingParams(max_tokens=8)

    def outputs(seed: int) -> list[list[int]]:
        finished = run(make_engine(seed=seed), {"a": ([1], params), "b": ([1], params)})
        return [token_ids(finished["a"]), token_ids(finished["b"])]

    first = outputs(1)
    assert first[0] != first[1]
    assert outputs(1) == first
    assert outputs(2) != first


def test_a_stop_string_ends_the_text_before_it() -> None:
    engine = make_engine()
    text = run(engine, {"a": ([5, 6], GREEDY)})["a"].outputs[0].text
    stop = text[4:6]
    stopped = run(engine, {"b": ([5, 6], SamplingParams(temperature=0, max_tokens=12, stop=stop))})["b"].outputs[0]
    assert stopped.text == text[: text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    included = SamplingParams(temperature=0, max_tokens=12, stop=stop, include_stop_str_in_output=True)
    assert run(engine, {"c": ([5, 6], included)})["c"].outputs[0].text == text[: text.index(stop) + len(stop)]
    assert engine.stats().num_requests == 0


def test_a_stop_token_ends_the_tokens_with_it() -> None:
    tokens = expected([5, 6], 12)
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[tokens[3]])
    output = run(make_engine(), {"a": ([5, 6], params)})["a"].outputs[0]
    assert output.token_ids == tokens[: tokens.index(tokens[3]) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", tokens[3])


def test_eos_ends_unless_it_is_ignored_or_comes_before_min_tokens() -> None:
    plain = run(make_engine(eos_every=4), {"a": ([9], SamplingParams(temperature=0, max_tokens=40))})["a"].outputs[0]
    assert plain.token_ids[-1] == EOS
    assert (plain.finish_reason, plain.stop_reason) == ("stop", None)
    ignoring = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    ignored = run(make_engine(eos_every=4), {"a": ([9], ignoring)})["a"].outputs[0]
    assert len(ignored.token_ids) == 40
    assert ignored.token_ids.count(EOS) > 1
    late = SamplingParams(temperature=0, max_tokens=40, min_tokens=len(plain.token_ids) + 3)
    assert len(run(make_engine(eos_every=4), {"a": ([9], late)})["a"].outputs[0].token_ids) >= late.min_tokens


def test_without_max_tokens_the_context_is_the_limit() -> None:
    engine = make_engine(limits=make_limits(max_model_len=40))
    output = run(engine, {"a": (list(range(10)), SamplingParams(temperature=0, max_tokens=None))})["a"]
    assert len(token_ids(output)) == 30
    assert output.outputs[0].finish_reason == "length"


def test_logprobs_come_for_each_token_and_sum_up() -> None:
    output = run(make_engine(), {"a": ([3], SamplingParams(temperature=0, max_tokens=6, logprobs=3))})["a"].outputs[0]
    assert output.logprobs is not None
    assert [next(iter(told)) for told in output.logprobs] == output.token_ids
    owns = sampled_logprobs(np.array(output.token_ids, np.uint32))
    for told, own in zip(output.logprobs, owns, strict=True):
        assert [(each.logprob, each.rank) for each in told.values()] == [
            (pytest.approx(float(own) - 0.5 * index), index + 1) for index in range(3)
        ]
        assert all(isinstance(each.decoded_token, str) for each in told.values())
    assert output.cumulative_logprob == pytest.approx(float(owns.sum()))


def test_a_request_that_asked_for_no_logprobs_has_none_beside_one_that_did() -> None:
    outputs = run(make_engine(), {"a": ([3], GREEDY), "b": ([4], SamplingParams(logprobs=1, max_tokens=12))})
    assert outputs["a"].outputs[0].logprobs is None
    assert outputs["b"].outputs[0].logprobs is not None


def test_steps_give_the_same_object_with_more_in_it() -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2], SamplingParams(temperature=0, max_tokens=5))
    seen: list[RequestOutput] = []
    lengths = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen.append(output)
            lengths.append(len(token_ids(output)))
    assert all(output is seen[0] for output in seen)
    assert lengths == [1, 2, 3, 4, 5]


def test_an_abort_gives_out_what_there_is_and_frees_its_blocks() -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=100))
    engine.add_request("b", [4, 5, 6], GREEDY)
    for _ in range(4):
        engine.step()
    engine.abort_request("a")
    outputs = drain(engine)
    aborted = outputs["a"].outputs[0]
    assert aborted.finish_reason == "abort"
    assert aborted.token_ids == expected([1, 2, 3], 100)[: len(aborted.token_ids)]
    assert token_ids(outputs["b"]) == expected([4, 5, 6], 12)
    assert engine.stats().workers["local"].num_used_blocks == 0


def test_aborting_what_is_not_there_is_no_error() -> None:
    engine = make_engine()
    engine.abort_request("nobody")
    assert not engine.has_unfinished_requests()


def test_a_deadline_that_passed_ends_a_request_with_its_error() -> None:
    engine = make_engine()
    engine.add_request("late", [1], GREEDY, timeout_s=-1.0)
    engine.add_request("fine", [2], GREEDY, timeout_s=3600.0)
    outputs = drain(engine)
    assert outputs["late"].error is not None
    assert outputs["late"].error.code is ErrorCode.DEADLINE_EXCEEDED
    assert outputs["late"].outputs[0].finish_reason == "error"
    assert token_ids(outputs["fine"]) == expected([2], 12)


def test_a_lower_priority_number_is_served_first() -> None:
    engine = make_engine(scheduling_policy="priority", limits=make_limits(max_num_seqs=1))
    for request_id, priority in (("low", 5), ("high", -1), ("middle", 0)):
        engine.add_request(request_id, [1, 2], GREEDY, priority)
    assert list(drain(engine)) == ["high", "middle", "low"]


def test_a_priority_that_would_not_count_is_refused_by_name() -> None:
    engine = make_engine()
    with pytest.raises(PenstockError, match="served in the order in which they come") as raised:
        engine.add_request("a", [1, 2], GREEDY, 3)
    assert (raised.value.code, raised.value.param) == (ErrorCode.INVALID_ARGUMENT, "priority")
    engine.add_request("a", [1, 2], GREEDY, 0)
    assert list(drain(engine)) == ["a"]
    fair = make_engine(scheduling_policy="fair")
    fair.add_request("a", [1, 2], GREEDY, 3)
    assert list(drain(fair)) == ["a"]


def test_the_window_is_launched_before_the_first_result_is_read() -> None:
    for window in (1, 2, 4):
        engine = make_engine(plans_in_flight=window)
        engine.add_request("a", [1], GREEDY)
        engine.step()
        # One result was read, and its place was taken at once.
        assert engine.stats().workers["local"].num_plans_in_flight == window


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = make_engine()
    engine.add_request("a", [1], GREEDY)
    with pytest.raises(PenstockError, match="in use") as raised:
        engine.add_request("a", [2], GREEDY)
    assert raised.value.param == "request_id"
    assert token_ids(drain(engine)["a"]) == expected([1], 12)
    engine.add_request("a", [2], GREEDY)
    assert token_ids(drain(engine)["a"]) == expected([2], 12)


@pytest.mark.parametrize(
    ("prompt", "code", "what"),
    [
        ("", ErrorCode.INVALID_ARGUMENT, "empty"),
        ([], ErrorCode.INVALID_ARGUMENT, "empty"),
        ([0, 257], ErrorCode.INVALID_ARGUMENT, "257"),
        ([-1], ErrorCode.INVALID_ARGUMENT, "-1"),
        ([2**70], ErrorCode.INVALID_ARGUMENT, "integers"),
        ([1.5], ErrorCode.INVALID_ARGUMENT, "list of token ids"),
        ([True], ErrorCode.INVALID_ARGUMENT, "list of token ids"),
        (7, ErrorCode.INVALID_ARGUMENT, "list of token ids"),
        (None, ErrorCode.INVALID_ARGUMENT, "list of token ids"),
        ({}, ErrorCode.INVALID_ARGUMENT, "one of"),
        ({"prompt": "a", "prompt_token_ids": [1]}, ErrorCode.INVALID_ARGUMENT, "one of"),
        ({"prompt": 5}, ErrorCode.INVALID_ARGUMENT, "must be text"),
        ({"prompt": "a", "multi_modal_data": {}}, ErrorCode.UNIMPLEMENTED, "multi_modal_data"),
        ("half a pair \ud800", ErrorCode.INVALID_ARGUMENT, "Unicode"),
        ([1] * 512, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "512"),
        ([1] * 505, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "max_tokens"),
    ],
)
def test_a_wrong_prompt_is_refused_and_nothing_is_queued(prompt: object, code: ErrorCode, what: str) -> None:
    engine = make_engine()
    with pytest.raises(PenstockError, match=what) as raised:
        engine.add_request("a", prompt, GREEDY)  # type: ignore[arg-type]
    assert raised.value.code is code
    assert not engine.has_unfinished_requests()
    assert token_ids(run(engine, {"a": ([1], GREEDY)})["a"]) == expected([1], 12)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(stop_token_ids=[257]), SamplingParams(logit_bias={300: 1.0}), SamplingParams(max_tokens=513)],
)
def test_parameters_that_the_model_cannot_follow_are_refused(params: SamplingParams) -> None:
    engine = make_engine()
    with pytest.raises(PenstockError):
        engine.add_request("a", [1], params)
    assert not engine.has_unfinished_requests()


def test_a_prompt_that_the_blocks_cannot_hold_is_refused() -> None:
    engine = make_engine(limits=make_limits(num_blocks=4))
    with pytest.raises(PenstockError, match="maximum context length is 16 tokens"):
        engine.add_request("a", [1] * 16, SamplingParams(max_tokens=1))
