"""Names of fields are put back into the caller's words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.domain.errors import PenstockError, invalid
from gateway_svc.core.field_names import FieldName, beyond, in_callers_words, in_words_of
from gateway_svc.core.vocabulary import parse_tokenize

NAMES = (
    FieldName("max_tokens", "max_output_tokens"),
    FieldName("messages", "input", is_whole=True),
    FieldName("tools[].function.parameters", "tools[].input_schema"),
    FieldName("tools[].function", "tools[]"),
    FieldName("structured_outputs", "text.format", is_whole=True),
)


@pytest.mark.parametrize(
    ("message", "param", "told", "told_param"),
    [
        ("max_tokens is 9, and min_tokens 10", "max_tokens", "max_output_tokens is 9, and min_tokens 10",
         "max_output_tokens"),
        ("messages[3].content[0] must be an object", "messages[3].content[0]", "input must be an object", "input"),
        ("the template refuses these messages", "messages", "the template refuses these messages", "input"),
        ("tools[12].function.parameters.x is wrong", "tools[12].function.parameters.x",
         "tools[12].input_schema.x is wrong", "tools[12].input_schema.x"),
        ("tools[0].function.name is wrong", "tools[0].function.name", "tools[0].name is wrong", "tools[0].name"),
        ("structured_outputs.json: no", "structured_outputs", "text.format: no", "text.format"),
        ("my_max_tokens.max_tokens stays", "x", "my_max_tokens.max_tokens stays", "x"),
    ],
)  # fmt: skip
def test_places_keep_their_numbers(message: str, param: str, told: str, told_param: str) -> None:
    found = in_callers_words(invalid(message, param), NAMES)
    assert (found.message, found.param) == (told, told_param)


def test_each_prompt_has_its_own_field() -> None:
    names = FieldName("prompt", "text_2", since=2), FieldName("prompt", "text_1")
    told = [in_callers_words(invalid("the prompt is empty", "prompt"), names, at) for at in range(4)]
    assert [each.param for each in told] == ["text_1", "text_1", "text_2", "text_2"]
    assert {each.message for each in told} == {"the prompt is empty"}


def test_names_of_names_are_followed() -> None:
    names = beyond((FieldName("structured_outputs", "response_format", is_whole=True),),
                   (FieldName("response_format", "text.format"),))  # fmt: skip
    assert in_callers_words(invalid("x", "structured_outputs.json"), names).param == "text.format"
    assert in_callers_words(invalid("x", "response_format.type"), names).param == "text.format.type"


def test_what_tokenizers_call_a_text_is_a_prompt_where_it_is_tokenized() -> None:
    names = parse_tokenize(b'{"prompt": "hi"}').names
    assert in_callers_words(invalid("the text is no Unicode", "text"), names).param == "prompt"


def test_an_error_of_something_else_is_left_as_it_is() -> None:
    error = invalid("priority must be small", "priority")
    assert in_callers_words(error, NAMES) is error
    with pytest.raises(PenstockError) as raised, in_words_of(NAMES):
        raise error
    assert raised.value is error


@given(st.text(), st.none() | st.text())
def test_any_text_can_be_told(message: str, param: str | None) -> None:
    told = in_callers_words(invalid(message, param), NAMES)
    assert (told.param is None) == (param is None)
