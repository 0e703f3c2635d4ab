"""Logprobs of prompts: kept with their request, the first of each model, and gone with it."""

from bus_flow import AWKWARD, LONG_MS, Flow, id_of, sid_of

from servicekit.bus.calls import Fetch, KeepPromptOutput, LeaseShard, ReadPromptOutput, Retire, SessionKind

MODEL, OTHER = b"\0\r\n$-1{}", b"b" * 8


def test_the_first_that_are_kept_of_a_model_stay(flow: Flow) -> None:
    request_id = flow.running(flow.session())
    read = ReadPromptOutput(request_id, MODEL)
    first, second = (KeepPromptOutput(request_id, MODEL, each) for each in (AWKWARD, b"second"))
    assert flow.connection.execute([read, first, second, read]) == [None, True, False, AWKWARD]
    other = KeepPromptOutput(request_id, OTHER, b"other")
    assert flow.connection.execute([other, read, ReadPromptOutput(request_id, OTHER)]) == [True, AWKWARD, b"other"]


def test_a_request_that_is_not_there_takes_none(flow: Flow) -> None:
    assert flow.connection.call(KeepPromptOutput(id_of(9), MODEL, b"x")) is False
    assert flow.connection.call(Fetch(id_of(9))) is None


def test_they_are_kept_as_long_as_the_result_and_none_come_after_the_end(flow: Flow) -> None:
    detokenizer, request_id = flow.session(SessionKind.DETOKENIZER), flow.running(flow.session())
    flow.connection.execute([LeaseShard(detokenizer, 0), KeepPromptOutput(request_id, MODEL, b"x")])
    assert flow.connection.call(Retire(detokenizer, 0, request_id, b"result", LONG_MS, sid_of(77)))
    late = KeepPromptOutput(request_id, OTHER, b"late")
    assert flow.connection.execute([late, ReadPromptOutput(request_id, MODEL)]) == [False, b"x"]


def test_with_the_result_they_are_gone(flow: Flow) -> None:
    detokenizer, request_id = flow.session(SessionKind.DETOKENIZER), flow.running(flow.session())
    flow.connection.execute([LeaseShard(detokenizer, 0), KeepPromptOutput(request_id, MODEL, b"x")])
    assert flow.connection.call(Retire(detokenizer, 0, request_id, b"result", 0, sid_of(77)))
    assert flow.connection.call(ReadPromptOutput(request_id, MODEL)) is None
