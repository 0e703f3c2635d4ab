"""Structured outputs: whatever is drawn is of the form that was asked for, in any batch, and after any preemption."""

import json
import re
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engines import make_engine, make_limits, make_vocabulary, run

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import SamplingParams
from contract.domain.rows import TokenRows
from contract.domain.structured_outputs import StructuredOutputsParams
from scheduler_svc.core.sequence import QueuedRequest
from tokenizer_svc.core.grammars import GrammarCompiler
from worker_svc.core.pretended_model import expected_tokens

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "roles": {"type": "array", "items": {"enum": ["admin", "user"]}, "maxItems": 3},
    },
    "required": ["name", "age", "roles"],
    "additionalProperties": False,
}
GRAMMAR = 'start: greeting " " NAME\ngreeting: "hello" | "goodbye"\nNAME: /[A-Z][a-z]{1,8}/'
TAG = {"structures": [{"begin": "<f=a>", "schema": {"enum": [1, 2]}, "end": "</f>"}], "triggers": ["<f="]}


def is_person(text: str) -> bool:
    person = json.loads(text)
    is_known = set(person) == {"name", "age", "roles"} and len(person["name"]) <= 12
    return is_known and 0 <= person["age"] <= 150 and set(person["roles"]) <= {"admin", "user"}


CHOICES = ["yes", "no", 'a "quoted"\n one']
FORMS = {
    "json": (StructuredOutputsParams(json=PERSON), is_person),
    "tight": (StructuredOutputsParams(json=PERSON, disable_any_whitespace=True), is_person),
    "regex": (StructuredOutputsParams(regex=r"[a-c]{2,5}-\d{3}"), re.compile(r"[a-c]{2,5}-[0-9]{3}").fullmatch),
    "choice": (StructuredOutputsParams(choice=CHOICES), CHOICES.__contains__),
    "lark": (StructuredOutputsParams(grammar=GRAMMAR), re.compile("(hello|goodbye) [A-Z][a-z]{1,8}").fullmatch),
    "gbnf": (StructuredOutputsParams(grammar='root ::= "a" b+\nb ::= "b" | "c"'), re.compile("a[bc]+").fullmatch),
}  # fmt: skip


def params(form: StructuredOutputsParams, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 400, "structured_outputs": form, **changes})


@pytest.mark.parametrize("name", FORMS)
def test_a_finished_output_has_the_form_that_was_asked_for(name: str) -> None:
    form, has_form = FORMS[name]
    outputs = run(make_engine(), {str(seed): ("p", params(form, seed=seed, n=2)) for seed in range(8)})
    texts = [sample.text for output in outputs.values() for sample in output.outputs if sample.finish_reason == "stop"]
    assert texts
    assert all(has_form(text) for text in texts)


@given(seeds=st.lists(st.integers(0, 99), min_size=1, max_size=6, unique=True), blocks=st.integers(24, 60))
@settings(max_examples=15)
def test_batch_and_preemption_do_not_change_an_output(seeds: list[int], blocks: int) -> None:
    def outputs(limits: object, seeds: list[int]) -> list[list[int]]:
        asked = {
            str(seed): ("p" * (seed % 7 + 1), params(FORMS["json"][0], seed=seed, max_tokens=60)) for seed in seeds
        }
        found = run(make_engine(limits=limits, plans_in_flight=3), asked)
        return [found[str(seed)].outputs[0].token_ids for seed in seeds]

    together = outputs(make_limits(num_blocks=blocks, max_model_len=96), seeds)
    assert together == [each for seed in seeds for each in outputs(make_limits(max_model_len=96), [seed])]


def test_an_output_is_the_one_that_is_expected_of_its_sequence_alone() -> None:
    vocabulary = make_vocabulary()
    form = FORMS["json"][0]
    asked = params(form, seed=4, max_tokens=50)
    output = run(make_engine(), {"one": ("hello", asked)})["one"]
    sampling = replace(asked.sampling, grammar=GrammarCompiler(vocabulary).compile(form))
    drawn = expected_tokens(
        output.prompt_token_ids, sampling, 4, make_limits(), grammar_tokens=vocabulary.grammar_tokens
    )
    token_ids = list(output.outputs[0].token_ids)
    assert list(islice(drawn, len(token_ids))) == token_ids


def test_an_output_that_is_cut_says_so() -> None:
    output = run(make_engine(), {"cut": ("p", params(FORMS["json"][0], max_tokens=5))})["cut"].outputs[0]
    assert output.finish_reason == "length"
    stopped = run(make_engine(), {"cut": ("p", params(StructuredOutputsParams(regex="abcdef"), stop="cd"))})[
        "cut"
    ].outputs[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("ab", "stop", "cd")


def test_free_text_goes_on_until_a_trigger_comes() -> None:
    form = StructuredOutputsParams(structural_tag=json.dumps(TAG))
    grammar = GrammarCompiler(make_vocabulary()).compile(form)
    assert "<f=" in grammar
    assert run(make_engine(), {"one": ("p", params(form, max_tokens=20))})["one"].finished


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": {"type": "object", "not": {}}}, "structured_outputs.json: .*not"),
        ({"regex": "a("}, "structured_outputs.regex: .*unclosed"),
        ({"regex": "(?=a)b"}, "structured_outputs.regex: .*look"),
        ({"grammar": "start: nobody"}, "structured_outputs.grammar: .*nobody"),
        ({"structural_tag": '{"structures": [], "triggers": ["a"]}'}, "structural_tag: .*must have"),
        ({"structural_tag": '{"structures": [{"begin": "b", "end": ""}], "triggers": ["a"]}'}, "no trigger"),
    ],
)
def test_a_form_that_cannot_be_followed_is_refused_before_anything_runs(form: dict[str, object], message: str) -> None:
    engine = make_engine()
    with pytest.raises(PenstockError, match=message) as caught:
        engine.add_request("one", "p", params(StructuredOutputsParams(**form)))
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARGUMENT, "structured_outputs")
    assert not engine.has_unfinished_requests()


def test_a_sequence_whose_grammar_fails_ends_alone() -> None:
    engine = make_engine()
    scheduler_add = engine._scheduler.add

    def add(queued: QueuedRequest, now_ns: int) -> TokenRows:  # a tokenizer with another library let it pass
        if queued.n == 2:
            queued = replace(queued, sampling=replace(queued.sampling, grammar="start: nobody"))
        return scheduler_add(queued, now_ns)

    engine._scheduler.add = add  # type: ignore[method-assign]
    form = StructuredOutputsParams(regex="[a-z]{20}")
    found = run(engine, {"broken": ("p", params(form, n=2)), "whole": ("p", params(form))})
    assert [each.finish_reason for each in found["broken"].outputs] == ["error", "error"]
    assert "grammar" in found["broken"].error.message
    assert found["whole"].outputs[0].finish_reason == "stop"
    engine._scheduler.check_integrity()
