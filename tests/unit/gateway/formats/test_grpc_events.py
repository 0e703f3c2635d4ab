"""Chats over gRPC that break after any event and go on: each thought, word and call is told once."""

from collections.abc import Sequence

import pytest
from outputs import SPELLINGS, THOUGHTS, thoughts_of

from contract.domain import chain
from contract.domain.finish import FinishReason
from contract.domain.rows import TextRow
from gateway_svc import wire
from gateway_svc.core.formats.reading import OutputReading
from gateway_svc.core.streams import ClientStream, DeliveredSequence, Refusal, before, merge
from gateway_svc.core.told import ToldChoice
from penstock.client.chats import ChatChoice
from penstock.client.events import Delta
from penstock.client.wire import decode_event
from penstock.v1 import inference_pb2

REQUEST = b"r" * 16


def rows_of(text: str, size: int) -> list[TextRow]:
    """A sample's rows, a token for so many characters."""
    rows, known = [], chain.CHAIN_START
    for token, at in enumerate(range(0, len(text), size)):
        rows.append(TextRow(REQUEST, 0, token, at, known, (token,), text[at : at + size]))
        known = chain.extend(known, (token,))
    return [*rows, TextRow(REQUEST, 0, len(rows), len(text), known, (9,), "", finish=FinishReason.STOP)]


def heard(events: Sequence[inference_pb2.GenerateEvent], choice: ChatChoice) -> ChatChoice:
    for each in events:
        decoded = decode_event(each)
        assert isinstance(decoded, Delta)
        assert not decoded.text
        choice.extend(decoded)
    return choice


def gone_on(
    reading: OutputReading, rows: Sequence[TextRow], last: inference_pb2.Delta
) -> list[inference_pb2.GenerateEvent]:
    """The events after one, through a gateway that reads the text from its start."""
    num_tokens = last.token_offset + len(last.token_ids) // 4
    have = DeliveredSequence(num_tokens, last.characters_after, last.chain_after, claim=num_tokens)
    reader, stream, events = ClientStream(1), ClientStream(1, [have]), list[inference_pb2.GenerateEvent]()
    told = ToldChoice(reading, REQUEST, 0, have.num_chars)
    for row in (merge(rows[:num_tokens]), *rows[num_tokens:]):  # what there was comes at once
        read = reader.accept(row)
        assert not isinstance(read, Refusal)
        taken = stream.accept(read)
        known = read if isinstance(taken, Refusal) else before(read, taken)
        if known is not None:
            told.recall(known)
        if not isinstance(taken, Refusal):
            events += wire.deltas(0, taken, told)
    return events


@pytest.mark.parametrize("name", sorted(SPELLINGS))
def test_a_chat_that_breaks_after_any_event_is_told_once(name: str) -> None:
    thought = THOUGHTS.get(name, "<think>\nhm\n</think>\n\n")
    reading = OutputReading(name, thoughts_of(name).name, closing_token_id=3)
    rows = rows_of(thought + SPELLINGS[name][0], 3)
    told = ToldChoice(reading, REQUEST, 0)
    events = [event for row in rows for event in wire.deltas(0, row, told)]
    whole = heard(events, ChatChoice())
    assert (whole.reasoning, [each.name for each in whole.tool_calls]) == ("hm", ["f", "g"])
    assert (whole.finish_reason, whole.num_reasoning_tokens) == ("tool_calls", 4)
    for cut, event in enumerate(events[:-1], 1):
        choice = heard(events[:cut], ChatChoice())
        assert heard(gone_on(reading, rows, event.delta), choice) == whole
