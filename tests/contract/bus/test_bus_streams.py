"""Streams and connections: order, caps, reads that wait, calls in one write, many tasks on one connection."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from bus_flow import AWKWARD, LONG_MS, Flow, id_of, submit

from servicekit.bus import Bus, BusUnavailable
from servicekit.bus.calls import (
    Append,
    Claim,
    Commit,
    DropStream,
    Fetch,
    Hello,
    LastId,
    Length,
    Read,
    ReadGroup,
    SessionKind,
    SubmitOutcome,
    Tokenized,
)
from servicekit.bus.keys import TOKENIZERS

WAIT_MS = 600_000  # longer than any test takes: a read that is not woken up is noticed


def test_entries_come_back_whole_and_in_order(flow: Flow) -> None:
    stream = flow.bus.keys.key("s")
    appended = [{b"\x00name": AWKWARD, b"n": b"%d" % number} for number in range(20)]
    entry_ids = flow.connection.execute([Append(stream, fields) for fields in appended])
    assert flow.fields(stream) == appended
    assert [entry.entry_id for entry in flow.entries(stream)] == entry_ids
    assert flow.connection.call(LastId(stream)) == entry_ids[-1]
    assert flow.connection.call(Length(stream)) == 20


def test_read_goes_on_after_an_id_and_leaves_out_empty_streams(flow: Flow) -> None:
    keys = flow.bus.keys
    first, second = keys.key("one"), keys.key("two")
    entry_ids = flow.connection.execute([Append(first, {b"n": b"%d" % number}) for number in range(5)])
    found = flow.connection.call(Read({first: entry_ids[1], second: b"0-0"}, count=2))
    assert list(found) == [first]
    assert [entry.entry_id for entry in found[first]] == entry_ids[2:4]
    assert flow.connection.call(Read({first: entry_ids[-1], second: b"0-0"})) == {}


def test_read_of_no_streams_is_a_mistake(flow: Flow) -> None:
    with pytest.raises(ValueError, match="at least one stream"):
        flow.connection.call(Read({}))
    assert flow.connection.call(Length(flow.bus.keys.key("s"))) == 0


def test_a_stream_that_never_was_is_empty(flow: Flow) -> None:
    stream = flow.bus.keys.key("s")
    assert flow.connection.execute([LastId(stream), Length(stream), DropStream(stream)]) == [b"0-0", 0, None]


def test_a_dropped_stream_begins_again(flow: Flow) -> None:
    stream = flow.bus.keys.key("s")
    flow.connection.execute([Append(stream, {b"n": b"1"}), DropStream(stream), Append(stream, {b"n": b"2"})])
    assert flow.fields(stream) == [{b"n": b"2"}]


def test_a_capped_stream_keeps_about_the_newest(flow: Flow) -> None:
    stream = flow.bus.keys.key("s")
    flow.connection.execute([Append(stream, {b"n": b"%d" % number}, cap=50) for number in range(500)])
    kept = flow.fields(stream)
    assert 50 <= len(kept) <= 250
    assert kept[-1] == {b"n": b"499"}


def test_what_was_read_is_the_readers_own(flow: Flow) -> None:
    stream = flow.bus.keys.key("s")
    fields = {b"n": b"1"}
    flow.connection.call(Append(stream, fields))
    fields[b"n"] = b"changed by the writer"
    flow.fields(stream)[0][b"n"] = b"changed by a reader"
    assert flow.fields(stream) == [{b"n": b"1"}]


def test_execute_answers_in_order_and_nothing_for_nothing(flow: Flow) -> None:
    stream = flow.bus.keys.key("s")
    assert flow.connection.execute([]) == []
    length, outcome, entry_id, found = flow.connection.execute(
        [Length(stream), submit(id_of(1)), Append(stream, {b"n": b"1"}), Read({stream: b"0-0"}, block_ms=WAIT_MS)]
    )
    assert (length, outcome) == (0, SubmitOutcome.CREATED)
    assert [entry.entry_id for entry in found[stream]] == [entry_id]


def test_a_large_entry_passes(flow: Flow) -> None:
    stream, payload = flow.bus.keys.key("s"), bytes(range(256)) * 20_000
    flow.connection.call(Append(stream, {b"p": payload}))
    assert flow.fields(stream) == [{b"p": payload}]


# --- waiting ----------------------------------------------------------------------------------------------------------


def _while_waiting(bus: Bus, call: Read | ReadGroup, act: Callable[[], object]) -> object:
    """The answer that a blocked call gets once `act` has run."""
    connection = bus.connect()
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(connection.call(call)))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive(), "the call must wait"
    act()
    thread.join()
    connection.close()
    return answers[0]


def test_a_read_waits_for_the_next_entry_of_any_of_its_streams(flow: Flow) -> None:
    keys = flow.bus.keys
    first, second = keys.key("one"), keys.key("two")
    found = _while_waiting(
        flow.bus,
        Read({first: b"0-0", second: b"0-0"}, block_ms=WAIT_MS),
        lambda: flow.connection.execute([Append(keys.key("three"), {b"n": b"0"}), Append(second, {b"n": b"1"})]),
    )
    assert found == {second: flow.entries(second)}


def test_a_commit_wakes_the_worker(flow: Flow) -> None:
    sid = flow.session()
    steps = flow.bus.keys.steps("w")
    call = Read({steps: b"0-0"}, block_ms=WAIT_MS)
    found = _while_waiting(flow.bus, call, lambda: flow.connection.call(Commit(sid, ((0, b"row"),), "w", b"plan")))
    assert found == {steps: flow.entries(steps)}


def test_a_submit_wakes_a_tokenizer(flow: Flow) -> None:
    call = ReadGroup(flow.bus.keys.prompts, TOKENIZERS, b"tokenizer-1", 10, block_ms=WAIT_MS)
    found = _while_waiting(flow.bus, call, lambda: flow.connection.call(submit(id_of(1))))
    assert found == flow.entries(flow.bus.keys.prompts)


def test_a_wait_ends_with_nothing_when_its_time_is_over(flow: Flow) -> None:
    stream = flow.bus.keys.key("s")
    assert flow.connection.call(Read({stream: b"0-0"}, block_ms=10)) == {}
    assert flow.connection.call(ReadGroup(stream, b"g", b"c", 1, block_ms=10)) == []


def test_closing_wakes_a_waiting_thread(bus: Bus) -> None:
    connection = bus.connect()
    errors: list[Exception] = []

    def wait() -> None:
        try:
            connection.call(Read({bus.keys.key("s"): b"0-0"}, block_ms=WAIT_MS))
        except BusUnavailable as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    connection.close()
    thread.join()
    assert len(errors) == 1


def test_a_closed_connection_can_reconnect(bus: Bus) -> None:
    connection = bus.connect()
    connection.close()
    with pytest.raises(BusUnavailable):
        connection.call(Length(bus.keys.key("s")))
    connection.reconnect()
    assert connection.call(Length(bus.keys.key("s"))) == 0
    connection.close()


# --- races ------------------------------------------------------------------------------------------------------------


def test_many_threads_claim_each_request_once(flow: Flow) -> None:
    num_requests, num_threads = 60, 4
    sids = [flow.session() for _ in range(num_threads)]
    request_ids = [flow.ready() for _ in range(num_requests)]
    claimed: list[bytes] = []

    def claim(sid: bytes) -> None:
        connection = flow.bus.connect()
        while requests := connection.call(Claim(sid, 3, 0)):
            claimed.extend(request.request_id for request in requests)
        connection.close()

    threads = [threading.Thread(target=claim, args=(sid,)) for sid in sids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == sorted(request_ids)


def test_many_threads_tokenize_each_request_once(flow: Flow) -> None:
    request_ids = [flow.submitted() for _ in range(30)]
    hints = flow.hints()
    won: list[bytes] = []

    def tokenize() -> None:
        connection = flow.bus.connect()
        for request_id, hint in zip(request_ids, hints, strict=True):
            if connection.call(Tokenized(request_id, hint.entry_id, b"meta", 1)):
                won.append(request_id)
        connection.close()

    threads = [threading.Thread(target=tokenize) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == sorted(request_ids)
    assert flow.connection.call(Length(flow.bus.keys.requests)) == 30


# --- event loops ------------------------------------------------------------------------------------------------------


def test_calls_of_many_tasks_share_a_connection(flow: Flow) -> None:
    async def test() -> None:
        connection = await flow.bus.connect_async()
        outcomes = await asyncio.gather(*(connection.call(submit(id_of(number))) for number in range(100)))
        assert set(outcomes) == {SubmitOutcome.CREATED}
        fetched = await asyncio.gather(
            *(connection.execute([Fetch(id_of(number)), Length(flow.bus.keys.prompts)]) for number in range(100))
        )
        assert [stored.request_id for stored, _ in fetched] == [id_of(number) for number in range(100)]
        assert await connection.execute([]) == []
        await connection.close()

    asyncio.run(test())


def test_a_task_waits_for_an_entry_while_others_work(flow: Flow) -> None:
    stream = flow.bus.keys.key("s")

    async def test() -> None:
        reader, writer = await flow.bus.connect_async(), await flow.bus.connect_async()
        waiting = asyncio.create_task(reader.call(Read({stream: b"0-0"}, block_ms=WAIT_MS)))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        entry_id = await writer.call(Append(stream, {b"n": b"1"}))
        assert [entry.entry_id for entry in (await waiting)[stream]] == [entry_id]
        assert await reader.call(Read({stream: entry_id}, block_ms=5)) == {}
        assert await reader.call(ReadGroup(stream, b"g", b"c", 5, block_ms=WAIT_MS)) == flow.entries(stream)
        await reader.close()
        await writer.close()

    asyncio.run(test())


def test_an_entry_from_another_thread_wakes_a_task(flow: Flow) -> None:
    stream = flow.bus.keys.key("s")

    async def test() -> None:
        connection = await flow.bus.connect_async()
        waiting = asyncio.create_task(connection.call(Read({stream: b"0-0"}, block_ms=WAIT_MS)))
        await asyncio.sleep(0.02)
        await asyncio.to_thread(flow.connection.call, Append(stream, {b"n": b"1"}))
        assert stream in await waiting
        await connection.close()

    asyncio.run(test())


def test_a_cancelled_task_takes_no_answer_from_another(flow: Flow) -> None:
    async def test() -> None:
        connection = await flow.bus.connect_async()
        cancelled = asyncio.create_task(connection.call(submit(id_of(1))))
        await asyncio.sleep(0)
        cancelled.cancel()
        for number in range(2, 12):
            assert await connection.call(Fetch(id_of(number))) is None
        await connection.close()

    asyncio.run(test())


def test_closing_fails_what_is_in_flight_and_what_comes_after(flow: Flow) -> None:
    async def test() -> None:
        connection = await flow.bus.connect_async()
        waiting = asyncio.create_task(
            connection.call(Read({flow.bus.keys.key("s"): b"0-0"}, block_ms=WAIT_MS)),
        )
        await asyncio.sleep(0.02)
        await connection.close()
        with pytest.raises(BusUnavailable):
            await waiting
        with pytest.raises(BusUnavailable):
            await connection.call(Hello(id_of(1), SessionKind.GATEWAY, "g", "", LONG_MS))

    asyncio.run(test())
