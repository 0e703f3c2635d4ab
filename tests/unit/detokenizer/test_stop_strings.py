"""Stop strings are found across piece borders, first by position, and nothing of them leaks out early."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detokenizer_svc.core.stops import StopStrings

_TEXT = st.text("abc", max_size=12)
_STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def _feed(pieces: list[str], stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    matcher = StopStrings(stops, include_in_output=include)
    out = ""
    for piece in pieces:
        text, stop = matcher.feed(piece)
        out += text
        if stop is not None:
            return out, stop
    return out + matcher.release(), None


def _reference(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Character by character over the whole text; of stops that end together the longest."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(found, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@settings(max_examples=100)
@given(pieces=st.lists(_TEXT, max_size=6), stops=_STOPS, include=st.booleans())
def test_the_outcome_is_that_of_a_search_in_the_whole_text(
    pieces: list[str], stops: tuple[str, ...], include: bool
) -> None:
    assert _feed(pieces, stops, include) == _reference("".join(pieces), stops, include)


@pytest.mark.parametrize("stops", [("bc", "abc", "c"), ("c", "abc", "bc"), ("abc", "bc", "c")])
@pytest.mark.parametrize("pieces", [["xabc"], ["xa", "bc"], ["x", "a", "b", "c"]])
def test_of_stops_that_end_at_the_same_character_the_one_that_began_first_wins(
    stops: tuple[str, ...], pieces: list[str]
) -> None:
    assert _feed(pieces, stops, include=False) == ("x", "abc")


@settings(max_examples=100)
@given(pieces=st.lists(_TEXT, max_size=6), stops=_STOPS)
def test_what_is_held_back_is_only_what_may_become_a_stop(pieces: list[str], stops: tuple[str, ...]) -> None:
    matcher = StopStrings(stops, include_in_output=False)
    seen = out = ""
    for piece in pieces:
        text, stop = matcher.feed(piece)
        seen, out = seen + piece, out + text
        if stop is not None:
            return
        held = seen[len(out) :]
        assert seen == out + held
        longest = max(
            (k for stop in stops for k in range(len(stop)) if seen.endswith(stop[:k])),
            default=0,
        )
        assert len(held) == longest


@settings(max_examples=100)
@given(unsearched=_TEXT, pieces=st.lists(_TEXT, max_size=4), stops=_STOPS)
def test_a_stop_that_ends_before_min_tokens_does_not_count(
    unsearched: str, pieces: list[str], stops: tuple[str, ...]
) -> None:
    matcher = StopStrings(stops, include_in_output=True)
    out, stop = matcher.feed(unsearched, search=False)
    assert stop is None
    for piece in pieces:
        text, stop = matcher.feed(piece)
        out += text
        if stop is not None:
            break
    else:
        out += matcher.release()
    text = unsearched + "".join(pieces)
    ends = [
        start + len(candidate)
        for candidate in stops
        for start in range(len(text))
        if text.startswith(candidate, start) and start + len(candidate) > len(unsearched)
    ]
    assert out == (text[: min(ends)] if ends else text)
    assert (stop is not None) == bool(ends)


def test_a_stop_may_begin_before_min_tokens_and_end_behind() -> None:
    matcher = StopStrings(("abc",), include_in_output=False)
    assert matcher.feed("xab", search=False) == ("x", None)
    assert matcher.feed("cd") == ("", "abc")


def test_a_text_kept_whole_is_not_held_back() -> None:
    matcher = StopStrings(("abc",), include_in_output=True)
    assert matcher.feed("xab") == ("xab", None)
    assert matcher.feed("cd") == ("c", "abc")


@settings(max_examples=300)
@given(pieces=st.lists(_TEXT, max_size=6), stops=_STOPS, include=st.booleans())
def test_a_piece_that_passes_is_output_as_it_is(pieces: list[str], stops: tuple[str, ...], include: bool) -> None:
    fed, skipping = (StopStrings(stops, include_in_output=include) for _ in range(2))
    for piece in pieces:
        expected = fed.feed(piece)
        if skipping.passes(piece):
            assert expected == (piece, None)
        else:
            assert skipping.feed(piece) == expected
        if expected[1] is not None:
            return
