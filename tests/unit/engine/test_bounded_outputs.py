"""Outputs without text, outputs that may not repeat themselves, and thoughts that may not be long."""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from simulated_engines import EOS, expected, make_engine, make_limits, make_vocabulary, run, token_ids
from tokenizers import AddedToken

from contract.domain.errors import PenstockError
from contract.domain.params import SamplingParams
from contract.domain.repetition import RepetitionDetectionParams
from contract.domain.structured_outputs import StructuredOutputsParams
from penstock.engine import LLMEngine
from scheduler_svc.core.config import SchedulerConfig
from servicekit.checkpoint.grammars import GrammarTokens
from worker_svc.core.pretended_model import expected_tokens
from worker_svc.core.simulated import SimulatedConfig, SimulatedRunner

PROMPT = list(range(1, 9))
FREE = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def params(**changes: Any) -> SamplingParams:
    return replace(FREE, **changes)


def test_an_output_that_is_not_detokenized_has_its_tokens_and_no_text() -> None:
    outputs = run(make_engine(), {"told": (PROMPT, FREE), "silent": (PROMPT, params(detokenize=False, logprobs=1))})
    told, silent = (outputs[name].outputs[0] for name in ("told", "silent"))
    assert told.text
    assert (silent.text, silent.token_ids, silent.finish_reason) == ("", told.token_ids, "length")
    assert silent.logprobs is not None
    assert all(entry.decoded_token for logprobs in silent.logprobs for entry in logprobs.values())


def test_nothing_can_stop_at_a_text_that_is_not_made() -> None:
    with pytest.raises(PenstockError, match="stop needs detokenize") as caught:
        params(detokenize=False, stop="x")
    assert caught.value.param == "stop"


def test_an_output_ends_where_it_repeats_itself() -> None:
    form = StructuredOutputsParams(regex="[ab]{40}")
    detection = RepetitionDetectionParams(max_pattern_size=4, min_count=3)
    asked = {str(seed): ("p", SamplingParams(seed=seed, max_tokens=40, structured_outputs=form)) for seed in range(6)}
    free = run(make_engine(), asked)
    bound = run(
        make_engine(),
        {name: (prompt, replace(each, repetition_detection=detection)) for name, (prompt, each) in asked.items()},
    )
    for name, output in bound.items():
        text = output.outputs[0].text
        assert output.outputs[0].finish_reason == "repetition"
        assert len(text) < 40
        assert free[name].outputs[0].text.startswith(text)
        assert any(text.endswith(text[-size:] * 3) and len(text) >= 3 * size for size in range(1, 5))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size must be an integer in"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count must be at least 2"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "min_pattern_size exceeds"),
        ({"max_pattern_size": True, "min_count": 2}, "max_pattern_size must be an integer in"),
    ],
)
def test_a_repetition_that_is_none_is_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        RepetitionDetectionParams(**said)


def test_a_pattern_of_no_tokens_ends_nothing() -> None:
    asked = params(repetition_detection=RepetitionDetectionParams(max_pattern_size=0))
    assert asked.stopping.repetition_detection is None


OPENS, CLOSES = 257, 258


def thinking_engine(**changes: int) -> LLMEngine:
    """An engine whose model has tokens that open and close a thought."""
    vocabulary = make_vocabulary()
    vocabulary.tokenizer.add_tokens([AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    vocabulary = replace(vocabulary, vocab_size=259, grammar_tokens=GrammarTokens(lambda: vocabulary.tokenizer, 259))
    limits = replace(make_limits(**changes), vocab_size=259)
    runner = SimulatedRunner(limits, SimulatedConfig(), time.monotonic_ns, time.sleep, vocabulary.grammar_tokens)
    config = SchedulerConfig(plans_in_flight=3, max_num_batched_tokens=limits.max_num_batched_tokens)
    return LLMEngine(vocabulary, runner, config)


def expected_thought(prompt: list[int], asked: SamplingParams, count: int) -> list[int]:
    sampling = replace(asked.sampling, thinking_token_ids=(OPENS, CLOSES))
    tokens: Iterator[int] = expected_tokens(prompt, sampling, 0, replace(make_limits(), vocab_size=259))
    return list(islice(tokens, count))


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_thought_is_closed_once_it_has_its_tokens(budget: int) -> None:
    asked = params(thinking_token_budget=budget)
    prompt = [*PROMPT, OPENS]
    output = token_ids(run(thinking_engine(), {"a": (prompt, asked)})["a"])
    closed = output.index(CLOSES)
    assert closed <= budget
    assert output == expected_thought(prompt, asked, 40)
    free = token_ids(run(thinking_engine(), {"a": (prompt, FREE)})["a"])
    assert output[:closed] == free[:closed]
    assert closed == budget or free[closed] == CLOSES


def test_preemption_and_neighbours_do_not_change_where_a_thought_ends() -> None:
    prompts = {str(number): [*range(number + 1, number + 9), OPENS] for number in range(6)}
    asked = {name: params(thinking_token_budget=int(name) + 2) for name in prompts}
    engine = thinking_engine(num_blocks=40, max_model_len=64)
    outputs = run(engine, {name: (prompts[name], asked[name]) for name in prompts})
    assert engine.stats().counters.num_preemptions > 0
    assert {name: token_ids(each) for name, each in outputs.items()} == {
        name: expected_thought(prompts[name], asked[name], 40) for name in prompts
    }


def test_a_form_after_a_thought_is_followed_all_the_same() -> None:
    form = StructuredOutputsParams(grammar=f"start: /(.|\\n)*/ <[{CLOSES}]> /[ab]{{3}}/")
    asked = SamplingParams(seed=1, max_tokens=60, structured_outputs=form, thinking_token_budget=5)
    sample = run(thinking_engine(), {"a": ([*PROMPT, OPENS], asked)})["a"].outputs[0]
    closed = sample.token_ids.index(CLOSES)
    assert closed <= 5
    assert sample.finish_reason == "stop"
    assert len(sample.token_ids[closed + 1 :]) == 4
    assert sample.token_ids[-1] == EOS


def test_a_budget_that_cannot_hold_is_refused() -> None:
    for engine, changes, message in (
        (make_engine(), {}, "needs thoughts between <think> and </think>"),
        (thinking_engine(), {"suppress_tokens": (CLOSES,)}, "which closes a thought, and the request forbids it"),
        (thinking_engine(), {"allowed_token_ids": (1, 2)}, "which closes a thought, and the request forbids it"),
        (thinking_engine(), {"bad_words": ("</think>",)}, "which closes a thought, and the request forbids it"),
    ):
        with pytest.raises(PenstockError, match=message) as caught:
            engine.add_request("a", PROMPT, params(thinking_token_budget=1, **changes))
        assert caught.value.param == "thinking_token_budget"


def test_the_helpers_agree_on_what_is_expected() -> None:
    assert token_ids(run(make_engine(), {"a": (PROMPT, FREE)})["a"]) == expected(PROMPT, 40, FREE)
