"""Hints that tokenizers share."""

from bus_flow import LONG_MS, Flow

from servicekit.bus import keys as k
from servicekit.bus.calls import Acknowledge, Length, ReadGroup, Reclaim, Tokenized


def test_an_acknowledged_hint_is_gone(flow: Flow) -> None:
    flow.submitted()
    (hint,) = flow.hints()
    keys = flow.bus.keys
    flow.connection.execute([Acknowledge(keys.prompts, k.TOKENIZERS, hint.entry_id)] * 2)
    assert flow.connection.call(Length(keys.prompts)) == 0
    assert flow.connection.call(Reclaim(keys.prompts, k.TOKENIZERS, b"tokenizer-2", 0, 10)) == []


def test_finished_hints_do_not_stand_before_those_that_wait(flow: Flow) -> None:
    keys = flow.bus.keys
    request_ids = [flow.submitted() for _ in range(3)]
    first, second, third = flow.hints()
    flow.connection.execute(
        [
            Tokenized(request_ids[0], first.entry_id, b"meta", 1),
            Acknowledge(keys.prompts, k.TOKENIZERS, second.entry_id),
        ]
    )
    assert flow.connection.call(Reclaim(keys.prompts, k.TOKENIZERS, b"tokenizer-2", 0, 1)) == [third]


def test_each_hint_goes_to_one_tokenizer_until_it_waited_too_long(flow: Flow) -> None:
    keys = flow.bus.keys
    first, second = flow.submitted(), flow.submitted()
    (one,) = flow.connection.call(ReadGroup(keys.prompts, k.TOKENIZERS, b"tokenizer-1", 1))
    (two,) = flow.connection.call(ReadGroup(keys.prompts, k.TOKENIZERS, b"tokenizer-2", 9))
    assert (one.fields[k.REQUEST], two.fields[k.REQUEST]) == (first, second)
    assert flow.connection.call(Reclaim(keys.prompts, k.TOKENIZERS, b"tokenizer-3", LONG_MS, 10)) == []
    assert flow.connection.call(Reclaim(keys.prompts, k.TOKENIZERS, b"tokenizer-3", 0, 1)) == [one]
    assert flow.connection.call(Reclaim(keys.prompts, k.TOKENIZERS, b"tokenizer-3", 0, 10)) == [one, two]


def test_hints_that_a_consumer_was_given_can_be_read_again_until_they_are_acknowledged(flow: Flow) -> None:
    stream, connection = flow.bus.keys.prompts, flow.connection
    again = ReadGroup(stream, k.TOKENIZERS, b"tokenizer-1", 10, pending=True)
    assert connection.call(again) == []
    for _ in range(3):
        flow.submitted()
    given = connection.call(ReadGroup(stream, k.TOKENIZERS, b"tokenizer-1", 2))
    connection.call(ReadGroup(stream, k.TOKENIZERS, b"tokenizer-2", 10))
    assert connection.call(again) == connection.call(again) == given
    connection.call(Acknowledge(stream, k.TOKENIZERS, given[0].entry_id))
    assert connection.call(again) == given[1:]
    assert connection.call(Reclaim(stream, k.TOKENIZERS, b"tokenizer-2", 0, 1)) == given[1:]
    assert connection.call(again) == []


def test_reclaim_makes_its_group(flow: Flow) -> None:
    assert flow.connection.call(Reclaim(flow.bus.keys.prompts, k.TOKENIZERS, b"tokenizer-1", 0, 10)) == []
    request_id = flow.submitted()
    assert [hint.fields[k.REQUEST] for hint in flow.hints()] == [request_id]
