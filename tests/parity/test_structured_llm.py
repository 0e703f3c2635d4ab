"""Structured outputs of a real model, judged by a validator that is not ours."""

import random
from pathlib import Path
from typing import Any

import pytest

from bench.rig.schemas import random_regex, random_schema
from bench.structured import mistake
from contract.domain.errors import PenstockError
from penstock import LLM, SamplingParams, StructuredOutputsParams
from tokenizer_svc.core.grammars import GrammarCompiler

MODEL = Path(__file__).parents[2] / "penstock" / "bundled_model"
PROMPT = "Tell me a story about a fox."


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, max_num_seqs=32)


def params(form: StructuredOutputsParams | None, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 300, "structured_outputs": form, "temperature": 1.0, "seed": 3, **changes})


def test_finished_outputs_are_what_their_schemas_and_expressions_say(llm: LLM) -> None:
    rng = random.Random(5)
    meanings = [random_schema(rng) for _ in range(12)] + [random_regex(rng) for _ in range(12)]
    compiler = GrammarCompiler(llm.llm_engine.vocabulary)
    refused, taken, asked = [], [], []
    for meaning in meanings:
        key = "regex" if isinstance(meaning, str) else "json"
        try:
            form = StructuredOutputsParams(**{key: meaning})
            compiler.compile(form)
        except PenstockError as error:
            refused.append(error.message)
            continue
        taken.append(meaning)
        asked.append(params(form))
    assert all("Unimplemented" in message for message in refused)
    outputs = [each.outputs[0] for each in llm.generate([PROMPT] * len(asked), asked, use_tqdm=False)]
    ended = zip(taken, outputs, strict=True)
    finished = [(meaning, each.text) for meaning, each in ended if each.finish_reason == "stop"]
    assert len(finished) > len(meanings) / 2
    assert [found for meaning, text in finished if (found := mistake(meaning, text))] == []
    # Alone, each is what it was beside the others.
    for index in (0, len(asked) - 1):
        (alone,) = llm.generate([PROMPT], asked[index], use_tqdm=False)
        assert alone.outputs[0].text == outputs[index].text


def test_greedy_and_logprobs_see_the_raw_logits(llm: LLM) -> None:
    form = StructuredOutputsParams(regex="[0-9]{4}")
    asked = [params(each, max_tokens=4, temperature=0, logprobs=1) for each in (None, form)]
    free, bound = (each.outputs[0] for each in llm.generate([PROMPT] * 2, asked, use_tqdm=False))
    assert bound.text.isdigit()
    assert free.logprobs is not None
    assert bound.logprobs is not None
    top_of = [max(each.values(), key=lambda one: one.logprob).logprob for each in (free.logprobs[0], bound.logprobs[0])]
    assert top_of[0] == top_of[1]
    assert bound.logprobs[0][bound.token_ids[0]].rank > 1


def test_the_validator_knows_what_is_wrong() -> None:
    assert mistake({"type": "object"}, "[]")
    assert mistake({"type": "object"}, "{")
    assert mistake("a+", "b")
    assert not mistake({"type": "string", "format": "date-time"}, '"never"')
    assert mistake({"type": "string", "format": "date-time"}, '"never"', validate_formats=True)
