"""Event streams told part by part: wherever the text is cut and a client comes back, it is told the same."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outputs import EXAMPLES
from part_streams import Client, as_rows, events_of, head, joined, reading
from test_reader import NAMES, OUTPUTS, parts_of

from contract.domain.finish import FinishReason
from gateway_svc.core.api import Api
from gateway_svc.core.apis import APIS
from gateway_svc.core.streams import merge

TOLD_IN_PARTS = [api for api in APIS if api.numbers_events]
PARTED = pytest.mark.parametrize("api", TOLD_IN_PARTS, ids=lambda api: api.form.value)
_OUTPUTS = st.tuples(st.sampled_from(NAMES), OUTPUTS)
CUTS = st.lists(st.integers(0, 400), max_size=9)


@PARTED
@settings(max_examples=400)
@given(_OUTPUTS, st.tuples(CUTS, CUTS), st.floats(0, 1), st.tuples(st.booleans(), st.booleans()))
def test_what_was_told_before_and_what_is_told_after_is_what_is_told_at_once(
    api: Api, output: tuple[str, str], cutting: tuple[list[int], list[int]], left: float, flags: tuple[bool, bool]
) -> None:
    (name, text), (cuts, others), (thinks, is_whole) = output, cutting, flags
    finish = FinishReason.STOP if is_whole else FinishReason.LENGTH
    told = head(api, reading(name, begins_thinking=thinks), wants_logprobs=True)
    rows = as_rows(parts_of(text, cuts), finish)
    whole = events_of(Client.after(api, told, "").take(rows).told)
    have = whole[: 1 + int(left * (len(whole) - 1))]
    rest = events_of(Client.after(api, told, have[-1][0]).take(rows).told)
    assert [*have, *rest] == whole
    # The text may come in other parts then: to a second gateway, or where a result is read.
    places = sorted({min(each % (len(rows) + 1), len(rows)) for each in others} | {0, len(rows)})
    merged = [merge(rows[start:stop]) for start, stop in pairwise(places)]
    rest = events_of(Client.after(api, told, have[-1][0]).take(merged).told)
    assert joined([*have, *rest]) == joined(whole)


@PARTED
@settings(max_examples=200)
@given(st.sampled_from(NAMES), OUTPUTS, CUTS)
def test_numbers_only_rise(api: Api, name: str, text: str, cuts: list[int]) -> None:
    client = Client.after(api, head(api, reading(name)), "").take(as_rows(parts_of(text, cuts)))
    numbers = [fields["sequence_number"] for _, _, fields in events_of(client.told) if "sequence_number" in fields]
    assert numbers == sorted(set(numbers))


@PARTED
@pytest.mark.parametrize(("name", "spelling"), EXAMPLES)
def test_a_reply_says_what_the_stream_said(api: Api, name: str, spelling: str) -> None:
    told = head(api, reading(name))
    (row,) = as_rows([spelling])
    (*_, (_, _, last)) = events_of(Client.after(api, told, "").take([row]).told)
    reply = api.reply(told)
    reply.add(0, row)
    fields = reply.fields([row.usage])  # type: ignore[list-item]
    assert "response" not in last or last["response"] == fields
