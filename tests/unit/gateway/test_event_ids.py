"""Event ids say what a client has, fit one request only, and never lead to a splice."""

from dataclasses import replace
from string import ascii_letters

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.domain import chain
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.finish import FinishReason
from contract.domain.rows import TextRow
from gateway_svc.core.event_ids import EventIds, parse_event_id
from gateway_svc.core.streams import ClientStream, DeliveredSequence, Refusal

REQUEST, OTHER = b"r" * 16, b"s" * 16
TOKENS, TEXTS = [1, 2, 3, 4], ["a", "bc", "", "d"]

states = st.builds(
    DeliveredSequence,
    st.integers(1, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.sampled_from([FinishReason.UNSPECIFIED, FinishReason.STOP, FinishReason.LENGTH]),
)


def event_id(have: list[DeliveredSequence], request_id: bytes = REQUEST) -> str:
    """The id of an event behind which the client has this."""
    ids = EventIds(request_id, have)
    last = have[-1]
    line = ids.after(len(have) - 1, last.num_tokens, last.num_chars, last.chain, last.finish)
    name, _, value = line.decode().partition(": ")
    assert name == "id"
    assert value.endswith("\n")
    return value[:-1]


def values(have: list[DeliveredSequence]) -> list[tuple[int, int, int, FinishReason]]:
    return [(each.num_tokens, each.num_chars, each.chain, each.finish) for each in have]


@given(st.lists(states, min_size=1, max_size=8))
def test_an_id_says_what_the_client_has_of_each_choice(have: list[DeliveredSequence]) -> None:
    text = event_id(have)
    assert text.isascii()
    assert not set(text) & set(" \r\n")
    found = parse_event_id(text, REQUEST, len(have))
    assert values(found) == values(have)
    assert all(each.is_claimed for each in found)


def test_the_id_of_one_choice_is_short() -> None:
    assert len(event_id([DeliveredSequence(7, 30, 1 << 63)])) == 29


def test_each_event_brings_its_own_choice_forward() -> None:
    ids = EventIds(REQUEST, [DeliveredSequence(), DeliveredSequence()])
    ids.after(1, 5, 9, 77, FinishReason.UNSPECIFIED)
    line = ids.after(0, 2, 3, 88, FinishReason.STOP)
    found = parse_event_id(line.decode()[4:-1], REQUEST, 2)
    assert values(found) == [(2, 3, 88, FinishReason.STOP), (5, 9, 77, FinishReason.UNSPECIFIED)]


@given(st.lists(states, min_size=1, max_size=3), st.integers(0), st.characters(codec="utf-8"))
def test_an_id_with_another_character_is_refused(have: list[DeliveredSequence], at: int, other: str) -> None:
    text = event_id(have)
    at %= len(text)
    changed = text[:at] + other + text[at + 1 :]
    if changed == text:
        return
    with pytest.raises(PenstockError) as raised:
        parse_event_id(changed, REQUEST, len(have))
    assert (raised.value.code, raised.value.param) == (ErrorCode.INVALID_ARGUMENT, "last-event-id")


@given(st.lists(states, min_size=1, max_size=3), st.sampled_from(ascii_letters))
def test_bits_that_stand_for_nothing_must_be_as_they_were_written(have: list[DeliveredSequence], other: str) -> None:
    text = event_id(have)
    last = len(text.rstrip("=")) - 1
    if other == text[last]:
        return
    with pytest.raises(PenstockError):
        parse_event_id(text[:last] + other + text[last + 1 :], REQUEST, len(have))


@given(st.text())
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(PenstockError):
        parse_event_id(text, REQUEST, 1)


def test_an_id_of_another_request_or_shape_is_refused() -> None:
    one = [DeliveredSequence(1, 1, 9)]
    for text, num_choices in (
        (event_id(one, OTHER), 1),
        (event_id(one), 2),
        (event_id([DeliveredSequence(0, 1, 9)]), 1),
    ):
        with pytest.raises(PenstockError) as raised:
            parse_event_id(text, REQUEST, num_choices)
        assert raised.value.code is ErrorCode.INVALID_ARGUMENT


# --- what a claim leads to --------------------------------------------------------------------------------------------


def row_between(start: int, stop: int, *, ends: bool = False) -> TextRow:
    return TextRow(
        REQUEST,
        0,
        start,
        len("".join(TEXTS[:start])),
        chain.extend(chain.CHAIN_START, TOKENS[:start]),
        tuple(TOKENS[start:stop]),
        "".join(TEXTS[start:stop]),
        finish=FinishReason.STOP if ends else FinishReason.UNSPECIFIED,
    )


def claiming(num_tokens: int, /, **wrong: object) -> ClientStream:
    """A client that came back with the first tokens, and says something wrong of them."""
    known = chain.extend(chain.CHAIN_START, TOKENS[:num_tokens])
    state = DeliveredSequence(num_tokens, len("".join(TEXTS[:num_tokens])), known, claim=num_tokens)
    return ClientStream(1, [replace(state, **wrong)])  # type: ignore[arg-type]


@pytest.mark.parametrize("start", [0, 1, 2])
def test_a_true_claim_is_continued_behind_itself(start: int) -> None:
    taken = claiming(2).accept(row_between(start, 4, ends=True))
    assert isinstance(taken, TextRow)
    assert (taken.token_ids, taken.text, taken.finish) == ((3, 4), "d", FinishReason.STOP)


@pytest.mark.parametrize("start", [0, 1, 2])
def test_a_claim_of_another_history_diverges(start: int) -> None:
    stream = claiming(2, chain=9)
    assert stream.accept(row_between(start, 4)) is Refusal.DIVERGED
    assert stream.sequences[0].num_tokens == 2


@pytest.mark.parametrize("num_chars", [0, 2, 4])
def test_a_claim_of_other_text_diverges(num_chars: int) -> None:
    assert claiming(2, num_chars=num_chars).accept(row_between(2, 4)) is Refusal.DIVERGED


def test_a_claim_beyond_the_end_diverges_and_one_beyond_what_is_known_waits() -> None:
    stream = claiming(2, num_tokens=9, claim=9)
    assert stream.accept(row_between(0, 3)) is Refusal.KNOWN
    assert stream.accept(row_between(0, 4, ends=True)) is Refusal.DIVERGED


def test_a_claimed_end_must_be_the_end() -> None:
    whole = row_between(0, 4, ends=True)
    assert claiming(4, finish=FinishReason.STOP).accept(whole) is Refusal.KNOWN
    assert claiming(4, finish=FinishReason.STOP).ended
    assert claiming(4, finish=FinishReason.LENGTH).accept(whole) is Refusal.DIVERGED
    assert claiming(3, finish=FinishReason.STOP).accept(whole) is Refusal.DIVERGED


def test_a_confirmed_claim_is_no_claim_any_more() -> None:
    stream = claiming(2)
    assert isinstance(stream.accept(row_between(2, 3)), TextRow)
    assert stream.accept(replace(row_between(3, 4), chain=9)) is Refusal.BEHIND
