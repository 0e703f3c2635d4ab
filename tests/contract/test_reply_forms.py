"""The form of a reply is read as it was stored, whatever is in it."""

from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.core.ask import Form
from gateway_svc.core.field_names import FieldName
from gateway_svc.core.formats.reading import OutputReading
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.wire.reply_form import decode_reply_form, encode_reply_form

_U64 = st.integers(0, 2**64 - 1)
_NAMES = st.lists(st.text(max_size=9), max_size=3).map(tuple)
READINGS = st.builds(
    OutputReading,
    tool_format=st.sampled_from(["", "hermes", "of tomorrow"]),
    reasoning_format=st.sampled_from(["", "think"]),
    begins_thinking=st.booleans(),
    without_reasoning=st.booleans(),
    hidden=_NAMES,
    closing_token_id=st.none() | st.integers(0, 2**32 - 1),
    texts=st.lists(st.tuples(st.text(max_size=9), _NAMES), max_size=2).map(tuple),
)
FORMS = st.builds(
    ReplyForm,
    request_ids=st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=3).map(tuple),
    n=st.integers(1, 8),
    form=st.sampled_from(Form),
    model=st.text(max_size=9),
    arrival_ns=_U64,
    deadline_ns=_U64,
    seed=_U64,
    wants_logprobs=st.booleans(),
    wants_prompt_logprobs=st.booleans(),
    echoes_logprobs=st.booleans(),
    without_output=st.booleans(),
    tokens_as_ids=st.booleans(),
    include_usage=st.booleans(),
    is_resumable=st.booleans(),
    continuous_usage=st.booleans(),
    asked=st.binary(max_size=16),
    api_key=st.binary(max_size=8),
    reading=st.none() | READINGS,
    context=st.binary(max_size=9),
    names=st.lists(
        st.builds(
            FieldName,
            st.text(max_size=9),
            st.text(max_size=9),
            is_whole=st.booleans(),
            since=st.integers(0, 2**32 - 1),
        ),
        max_size=2,
    ).map(tuple),
)


@given(FORMS)
def test_a_form_is_read_as_it_was_stored(form: ReplyForm) -> None:
    assert decode_reply_form(encode_reply_form(form)) == form
