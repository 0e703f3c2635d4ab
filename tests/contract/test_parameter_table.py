"""A parameter is a line of `SamplingParams`: its part, the wire format, bodies and defaults have what it says."""

from dataclasses import asdict, fields
from typing import Any

import pytest
from google.protobuf.message import Message

from contract.domain.errors import PenstockError
from contract.domain.generation_defaults import FILLED, GenerationDefaults
from contract.domain.parameter import Biases, Filled, Number, Parameter, Part
from contract.domain.params import PARAMETERS, PARTS, SamplingParams, Stopping
from contract.v1 import requests_pb2
from gateway_svc.core.openai import CHAT_FIELDS, COMPLETION_FIELDS
from worker_svc.core.kernels.state.tables import FLOATS, INTEGERS, TEMPERATURE

MESSAGES: dict[Part, type[Message]] = {
    Part.SAMPLING: requests_pb2.SamplingParameters,
    Part.STOPPING: requests_pb2.StoppingParameters,
    Part.TEXT: requests_pb2.TextParameters,
}

MADE = {"bad_word_ids", "grammar", "thinking_token_ids"}  # by tokenizers


@pytest.mark.parametrize("part", MESSAGES)
def test_a_part_has_the_parameters_of_its_lines_and_their_defaults(part: Part) -> None:
    params = SamplingParams(max_tokens=None)
    whole = {Part.SAMPLING: params.sampling, Part.STOPPING: params.stopping, Part.TEXT: params.text}[part]
    others = {each.name for each in fields(whole)} - {line.field for line in PARTS[part]}
    assert others == (MADE if part is Part.SAMPLING else set())
    assert whole == type(whole)()


@pytest.mark.parametrize("part", MESSAGES)
def test_a_message_has_a_field_for_each_line_and_no_other(part: Part) -> None:
    known = set(MESSAGES[part].DESCRIPTOR.fields_by_name)
    said = set()
    for each in PARTS[part]:
        said |= {f"{each.field}_ids", f"{each.field}_values"} if isinstance(each.kind, Biases) else {each.field}
    # Told by gateways, of no parameter.
    assert known - {"max_tokens_is_default"} - MADE == said


def test_bodies_of_both_calls_have_every_parameter() -> None:
    assert set(PARAMETERS) <= COMPLETION_FIELDS & CHAT_FIELDS


def test_the_workers_columns_are_those_that_lines_name() -> None:
    assert (FLOATS[TEMPERATURE], TEMPERATURE, INTEGERS) == ("temperature", 0, ("top_k",)), "kernels read the first"
    assert len(FLOATS) == 6


@pytest.mark.parametrize("name", PARAMETERS)
def test_what_is_of_no_kind_at_all_is_refused_by_its_name(name: str) -> None:
    wrong: Any = object()
    with pytest.raises(PenstockError) as refused:
        SamplingParams(**{name: wrong})
    assert refused.value.param == name


def test_a_model_has_defaults_of_the_lines_that_say_so_and_no_others() -> None:
    assert FILLED["max_tokens"].filled == "max_new_tokens"
    assert GenerationDefaults(top_k=3, min_p=None).stated == {"top_k": 3}
    with pytest.raises(TypeError, match="frequency_penalty"):
        GenerationDefaults(frequency_penalty=1.0)


def test_a_line_says_what_is_optional_in_any_order() -> None:
    declaration = SamplingParams.__dataclass_fields__["max_tokens"].type
    line = Parameter.declared("max_tokens", declaration, 16)
    assert (line.may_be_none, line.part, line.column, line.filled) == (True, Part.STOPPING, None, "max_new_tokens")
    assert (Filled().key, Number(0, 1, open_low=True).bounds) == ("", "above 0, up to 1")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([], "must not be empty"),
        ([-1], "must be an integer in"),
        ("12", "must be a list"),
        (list(range(8193)), "may name at most 8192 tokens, got 8193"),
    ],
)
def test_a_list_of_allowed_tokens_has_some(wrong: Any, words: str) -> None:
    with pytest.raises(PenstockError, match=f"^allowed_token_ids {words}"):
        SamplingParams(allowed_token_ids=wrong)
    assert SamplingParams(allowed_token_ids=None).sampling.allowed_token_ids is None
    assert SamplingParams(allowed_token_ids=[4, 2, 4]).sampling.allowed_token_ids == (2, 4)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("a", "bad_words must be a list"),
        ([""], "a bad word must have 1 to 256 characters"),
        (["x" * 257], "a bad word must have 1 to 256 characters"),
        ([3], "a bad word must have 1 to 256 characters"),
        (["x"] * 65, "at most 64 bad words, got 65"),
    ],
)
def test_bad_words_are_some_texts(wrong: Any, words: str) -> None:
    with pytest.raises(PenstockError, match=f"^{words}") as refused:
        SamplingParams(bad_words=wrong)
    assert refused.value.param == "bad_words"
    assert SamplingParams(bad_words=None) != SamplingParams(bad_words=["a"])


def test_parts_are_read_as_those_who_read_them_want_them() -> None:
    params = SamplingParams(top_k=-1, suppress_tokens=[5, 3, 5], stop="x", stop_token_ids=[9, 8], logit_bias=None)
    assert params.stopping == Stopping(16, 0, (9, 8))
    assert (params.sampling.top_k, params.sampling.suppress_token_ids, params.text.stop) == (0, (3, 5), ("x",))
    assert asdict(params.sampling)["logit_bias"] == ()
