"""The detokenizer on a bus: text for gateways, ends for requests, whoever dies in between."""

import asyncio
import time

import numpy as np
import pytest
from text_pipeline import GATEWAY, SCHEDULER, Pool, eventually, running, text_of

from detokenizer_svc.servicer import DetokenizerServicer
from gateway_svc import wire as gateway_wire
from gateway_svc.core.streams import ClientStream, Refusal, SequenceState
from penstock.domain import chain
from penstock.domain.errors import ErrorCode, PenstockError
from penstock.domain.finish import CancelReason, FinishReason, Usage
from penstock.domain.request import Prompt
from penstock.domain.rows import TextRow
from penstock.v1 import detokenizer_pb2
from servicekit.bus import keys as k
from servicekit.bus.calls import (
    Append,
    Attach,
    Commit,
    Compact,
    DropStream,
    Hello,
    LeaseShard,
    Leave,
    Length,
    Reject,
    ReleaseShard,
    Revalidate,
    SessionKind,
)
from tokenizer_svc import wire as tokenizer_wire

ANSWER = "the old mill by the brook 日本"


def test_rows_become_text_and_the_request_ends_with_its_result(pool: Pool) -> None:
    with running(pool.detokenizer_service()):
        request_id = pool.open(1)
        ids = pool.generate(request_id, ANSWER)
        rows = pool.read_until_end(request_id)
        (stored,) = pool.result(request_id)
    assert text_of(rows) == ANSWER == stored.text
    assert stored.token_ids == tuple(ids)
    assert rows[-1].usage == Usage(3, len(ids), 0)
    assert rows[-1].finish is FinishReason.LENGTH


def test_a_stop_string_cancels_the_sequence(pool: Pool) -> None:
    with running(pool.detokenizer_service()):
        request_id = pool.open(1, stop=["mill"])
        pool.generate(request_id, ANSWER, end=0)
        rows = pool.read_until_end(request_id)
        (hint,) = eventually(lambda: pool.entries(pool.bus.keys.cancels))
    assert text_of(rows) == "the old "
    assert rows[-1].stop_reason == "mill"
    assert hint.fields[k.REQUEST] == request_id
    assert hint.fields[k.SEQUENCE] == b"0"


def test_a_rejected_request_ends_with_the_error(pool: Pool) -> None:
    error = PenstockError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long", param="prompt")
    with running(pool.detokenizer_service()):
        request_id = pool.submit(1, Prompt(text="x"), n=2)
        row = tokenizer_wire.encode_rejection(request_id, 2, error, SCHEDULER, 1)
        assert pool.connection.call(Reject(request_id, b"", 3, row))
        rows = pool.read_until_end(request_id)
    assert [(row.sequence, row.error.code if row.error else None) for row in rows] == [
        (0, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        (1, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
    ]
    assert rows[-1].usage == Usage(0, 0, 0)


class _Client:
    """A gateway's client: takes what extends what it has."""

    def __init__(self, pool: Pool, request_id: bytes, n: int = 1) -> None:
        self._pool, self._request_id = pool, request_id
        self.stream = ClientStream(n)
        self.text = ""

    def take(self, rows: list[TextRow]) -> None:
        for row in rows:
            if row.request_id == self._request_id and not isinstance(new := self.stream.accept(row), Refusal):
                self.text += new.text if row.sequence == 0 else ""

    def has_ended(self) -> bool:
        self.take(self._pool.read_text())
        return self.stream.ended


def test_a_successor_rebuilds_from_the_log_and_goes_on(pool: Pool) -> None:
    ids = pool.ids(ANSWER)
    half = len(ids) // 2
    request_id = pool.open(1)
    client = _Client(pool, request_id)
    with running(pool.detokenizer_service(name="first")):
        pool.commit(pool.rows(request_id, ids[:half]))
        eventually(lambda: client.take(pool.read_text()) or client.text)
    # Committed while nobody reads the shard.
    pool.commit(pool.rows(request_id, ids[half : half + 1], before=ids[:half]))
    with running(pool.detokenizer_service(name="second")):
        pool.commit(pool.rows(request_id, ids[half + 1 :], before=ids[: half + 1], end=FinishReason.LENGTH))
        eventually(client.has_ended)
    assert client.text == ANSWER


def test_a_request_that_ended_while_nobody_read_is_ended_by_the_successor(pool: Pool) -> None:
    request_id = pool.open(1)
    pool.generate(request_id, ANSWER)
    with running(pool.detokenizer_service()):
        rows = pool.read_until_end(request_id)
    assert text_of(rows) == ANSWER


def test_requests_that_have_ended_are_not_ended_again_by_a_successor(pool: Pool) -> None:
    ended, live = pool.open(1), pool.open(2)
    with running(pool.detokenizer_service()):
        pool.commit(pool.rows(live, pool.ids("x")))
        pool.generate(ended, ANSWER)
        pool.read_until_end(ended)
    service = pool.detokenizer_service()
    with running(service):
        assert not [row for row in pool.read_text() if row.request_id == ended]
        assert service.stats().num_live_requests == 1
        assert service.stats().num_retired == 0


def test_a_restarted_server_means_beginning_anew_from_the_log(pool: Pool) -> None:
    ids = pool.ids(ANSWER)
    request_id = pool.open(1)
    client = _Client(pool, request_id)
    service = pool.detokenizer_service()
    with running(service):
        pool.commit(pool.rows(request_id, ids[:3]))
        eventually(lambda: client.take(pool.read_text()) or client.text)
        pool.restart()
        for sid, kind in ((SCHEDULER, SessionKind.SCHEDULER), (GATEWAY, SessionKind.GATEWAY)):
            pool.connection.call(Hello(sid, kind, kind.value, "", 60_000))
            assert pool.connection.call(Revalidate(sid, 60_000))
        pool.commit(pool.rows(request_id, ids[3:], before=ids[:3], end=FinishReason.LENGTH))
        eventually(client.has_ended)
        assert service.stats().num_rebuilds == 8
    assert client.text == ANSWER


def test_attaching_sends_the_rest_to_the_new_gateway(pool: Pool) -> None:
    other = b"H" * 16
    ids = pool.ids(ANSWER)
    with running(pool.detokenizer_service()):
        request_id = pool.open(1)
        pool.commit(pool.rows(request_id, ids[:4]))
        first = eventually(pool.read_text)
        known = chain.extend(chain.CHAIN_START, first[0].token_ids)
        state = SequenceState(len(first[0].token_ids), len(first[0].text), known)
        attachment = Attach(request_id, "tenant", other, gateway_wire.encode_offsets([state]))
        assert pool.connection.call(attachment).known
        assert pool.connection.call(Attach(request_id, "tenant", other, b"\x0a\x01x")).known  # cannot be read
        eventually(lambda: pool.entries(pool.bus.keys.dead))
        pool.commit(pool.rows(request_id, ids[4:], before=ids[:4], end=FinishReason.LENGTH))
        eventually(lambda: pool.ended(request_id))
        rows = [
            row
            for entry in pool.entries(pool.bus.keys.text(other))
            for row in gateway_wire.decode_text(entry.fields[k.PAYLOAD])[1]
        ]
    assert text_of([*first, *rows]) == ANSWER


@pytest.mark.parametrize("damage", ["bytes", "columns"])
def test_rows_that_cannot_be_read_end_the_requests_they_concern(pool: Pool, damage: str) -> None:
    with running(pool.detokenizer_service()):
        hit, other_shard, later = pool.open(1), pool.open(2, shard=1), pool.open(3)
        ids = pool.ids("the mill")
        pool.commit(pool.rows(hit, ids[:1]))
        damaged = b"\xff\xff\xff"
        if damage == "columns":
            message = tokenizer_wire.encode_rejection(hit, 1, PenstockError(ErrorCode.INTERNAL, "x"), SCHEDULER, 1)
            damaged = message + b"\x2a\x01x"  # a second `sequences` column, of one byte
        pool.commit(damaged)
        rows = pool.read_until_end(hit)
        assert rows[-1].error is not None
        assert rows[-1].error.code is ErrorCode.INTERNAL
        pool.generate(other_shard, ANSWER, shard=1)
        assert text_of(pool.result(other_shard)) == ANSWER
        # Nobody can say whom bytes without sense concern: then it is everybody in that log.
        if damage == "columns":
            pool.generate(later, ANSWER)
            assert text_of(pool.result(later)) == ANSWER
        else:
            (row,) = pool.result(later)
            assert row.error is not None
        (letter,) = pool.entries(pool.bus.keys.dead)
        assert letter.fields[k.STREAM] == b"tokens"
        hints = pool.entries(pool.bus.keys.cancels)
        assert hit in {hint.fields[k.REQUEST] for hint in hints}


def test_damage_ends_all_samples_for_a_client_that_has_parts_of_them(pool: Pool) -> None:
    ids = pool.ids(ANSWER)
    stream = ClientStream(2)
    with running(pool.detokenizer_service()):
        request_id = pool.open(1, n=2)
        pool.commit(pool.rows(request_id, ids[:4]))
        for row in eventually(pool.read_text):
            assert not isinstance(stream.accept(row), Refusal)
        pool.commit(b"\xff\xff\xff")
        for row in eventually(pool.read_text):
            assert not isinstance(stream.accept(row), Refusal)
    assert stream.ended
    assert [state.num_tokens for state in stream.sequences] == [4, 0]


def test_an_opening_that_cannot_be_read_ends_its_request(pool: Pool) -> None:
    with running(pool.detokenizer_service()):
        request_id = pool.submit_raw(b"d" * 16, b"\xff", b"\xff")
        error = PenstockError(ErrorCode.INTERNAL, "damaged")
        row = tokenizer_wire.encode_rejection(request_id, 1, error, SCHEDULER, 1)
        assert pool.connection.call(Reject(request_id, b"", 0, row))
        rows = pool.read_until_end(request_id)
        assert rows[-1].error is not None
        pool.connection.call(Append(pool.bus.keys.tokens(0), {b"neither": b"nor"}))
        assert len(eventually(lambda: len(found := pool.entries(pool.bus.keys.dead)) == 2 and found)) == 2
        good = pool.open(1)
        pool.generate(good, ANSWER)
        assert text_of(pool.result(good)) == ANSWER


def test_a_long_request_leaves_a_short_log_and_a_successor_that_knows_it_all(pool: Pool) -> None:
    limit = 16
    log = pool.bus.keys.tokens(0)
    request_id = pool.open(1, n=2, logprobs=1, stop=["never", "the end"], max_tokens=1000)
    text = ANSWER * 40 + "the end of it"
    ids = pool.ids(text)
    client = _Client(pool, request_id, n=2)
    pool.commit(pool.rows(request_id, ids[:3], sequence=1, end=FinishReason.STOP))
    committed: list[int] = []
    for turn in range(4):  # each time another process takes the shard
        service = pool.detokenizer_service(compact_entries=limit, session_ttl_s=0.5)
        with running(service):
            assert len(pool.entries(log)) <= limit + 1, "of all that was generated a successor reads so much"
            for token_id in ids[len(committed) : (turn + 1) * len(ids) // 4]:
                pool.commit(pool.rows(request_id, [token_id], before=committed, logprob=-0.25))
                committed.append(token_id)
                eventually(lambda: pool.connection.call(Length(log)) <= limit + 1)
            assert service.stats().num_compactions > 3
    with running(pool.detokenizer_service(compact_entries=limit)):
        eventually(client.has_ended)
        first, second = pool.result(request_id)
        eventually(lambda: pool.connection.call(Length(log)) == 0)
    assert first.text == client.text == ANSWER * 40
    assert (first.stop_reason, second.text) == ("the end", pool.tokenizer.decode(ids[:2]))
    assert first.token_ids == tuple(ids[: len(first.token_ids)])
    assert len(first.token_ids) > 400
    assert [entry.logprob for entry in first.logprobs] == [-0.25] * len(first.token_ids)
    assert second.usage == Usage(3, len(first.token_ids) + 3, 0)


def test_a_checkpoint_that_cannot_be_read_ends_its_request_alone(pool: Pool) -> None:
    hit, other = pool.open(1), pool.open(2)
    holder = b"D" * 16
    pool.connection.call(Hello(holder, SessionKind.DETOKENIZER, "late", "", 60_000))
    checkpoints = ((hit, b"\xff\xff\xff"), (other, pool.rows(other, pool.ids("the "))))
    pool.connection.execute([LeaseShard(holder, 0), Compact(holder, 0, b"9999999999999-0", checkpoints), Leave(holder)])
    with running(pool.detokenizer_service()):
        (row,) = pool.result(hit)
        assert row.error is not None
        assert row.error.code is ErrorCode.INTERNAL
        pool.commit(pool.rows(other, pool.ids("mill"), before=pool.ids("the "), end=FinishReason.LENGTH))
        assert text_of(pool.result(other)) == "the mill"
        (letter,) = pool.entries(pool.bus.keys.dead)
        assert letter.fields[k.REQUEST] == hit


def test_a_shard_that_another_held_meanwhile_is_rebuilt(pool: Pool) -> None:
    # While a holder sleeps, another one takes its shard, compacts the log and leaves; it must not go on with a gap.
    service = pool.detokenizer_service(session_ttl_s=0.5)
    ids = pool.ids(ANSWER)
    with running(service):
        request_id = pool.open(1)
        pool.commit(pool.rows(request_id, ids[:2]))
        eventually(lambda: service.stats().num_live_requests == 1)
        num_rebuilds = service.stats().num_rebuilds
        other = b"D" * 16
        pool.connection.call(Hello(other, SessionKind.SCHEDULER, "other", "", 60_000))
        (sleeper,) = pool.sessions(SessionKind.DETOKENIZER)
        checkpoint = (request_id, pool.rows(request_id, ids[:4]))
        done = pool.connection.execute(
            [
                ReleaseShard(sleeper, 0),  # as if its lease had run out
                LeaseShard(other, 0),
                Commit(SCHEDULER, ((0, pool.rows(request_id, ids[2:4], before=ids[:2])),)),
                Compact(other, 0, b"9999999999999-0", (checkpoint,)),
                ReleaseShard(other, 0),
            ]
        )
        assert all(done[i] for i in (1, 2, 3))
        eventually(lambda: service.stats().num_rebuilds > num_rebuilds)
        pool.commit(pool.rows(request_id, ids[4:], before=ids[:4], end=FinishReason.LENGTH))
        assert text_of(pool.result(request_id)) == ANSWER


def test_the_log_is_trimmed_behind_what_live_requests_need(pool: Pool) -> None:
    log = pool.bus.keys.tokens(0)
    with running(pool.detokenizer_service(session_ttl_s=0.5)):
        ended, live = pool.open(1), pool.open(2)
        pool.generate(ended, ANSWER)
        pool.read_until_end(ended)
        opening = next(entry for entry in pool.entries(log) if entry.fields.get(k.REQUEST) == live)
        eventually(lambda: pool.entries(log)[0].entry_id == opening.entry_id)
        pool.generate(live, ANSWER)
        eventually(lambda: pool.connection.call(Length(log)) <= 1)


def test_shards_are_shared_with_a_second_detokenizer(pool: Pool) -> None:
    first = pool.detokenizer_service(name="first", session_ttl_s=0.5)
    second = pool.detokenizer_service(name="second", session_ttl_s=0.5)
    with running(first):
        eventually(lambda: first.stats().num_shards == 4)
        with running(second):
            eventually(lambda: first.stats().num_shards == second.stats().num_shards == 2)
            for number, shard in enumerate(range(4), start=1):
                request_id = pool.open(number, shard=shard)
                pool.generate(request_id, ANSWER, shard=shard)
                assert text_of(pool.result(request_id)) == ANSWER
        eventually(lambda: first.stats().num_shards == 4)


def test_a_shard_that_another_has_taken_is_let_go(pool: Pool) -> None:
    service = pool.detokenizer_service(session_ttl_s=0.5)
    with running(service):
        eventually(lambda: service.stats().num_shards == 4)
        usurper = b"U" * 16
        pool.connection.call(Hello(usurper, SessionKind.SCHEDULER, "usurper", "", 60_000))
        (holder,) = pool.sessions(SessionKind.DETOKENIZER)
        pool.connection.execute([ReleaseShard(holder, 2), LeaseShard(usurper, 2)])
        eventually(lambda: service.stats().num_shards == 3)


def test_draining_waits_for_live_requests_if_nobody_else_can_take_them(pool: Pool) -> None:
    service = pool.detokenizer_service()
    with running(service) as stop:
        request_id = pool.open(1)
        eventually(lambda: service.stats().num_live_requests)
        stop.drain()
        eventually(lambda: service.status().draining)
        pool.generate(request_id, ANSWER)
        assert text_of(pool.result(request_id)) == ANSWER


def test_draining_hands_live_requests_to_another_detokenizer(pool: Pool) -> None:
    first = pool.detokenizer_service(name="first", session_ttl_s=0.5)
    second = pool.detokenizer_service(name="second", session_ttl_s=0.5)
    ids = pool.ids(ANSWER)
    with running(second):
        with running(first) as stop:
            eventually(lambda: first.stats().num_shards == second.stats().num_shards == 2)
            live = [pool.open(number, shard=shard) for number, shard in enumerate(range(4), start=1)]
            for shard, request_id in enumerate(live):
                pool.commit(pool.rows(request_id, ids[:4]), shard)
            eventually(lambda: first.stats().num_live_requests == second.stats().num_live_requests == 2)
            stop.drain()
            eventually(lambda: second.stats().num_live_requests == 4)
        for shard, request_id in enumerate(live):
            pool.commit(pool.rows(request_id, ids[4:], before=ids[:4], end=FinishReason.LENGTH), shard)
            assert text_of(pool.result(request_id)) == ANSWER


def test_text_for_a_gateway_that_left_is_not_written(pool: Pool) -> None:
    service = pool.detokenizer_service(session_ttl_s=0.5)
    stream = pool.bus.keys.text(GATEWAY)
    with running(service):
        request_id = pool.open(1)
        pool.connection.execute([Leave(GATEWAY), DropStream(stream)])
        time.sleep(1.0)
        pool.generate(request_id, ANSWER)
        assert text_of(pool.result(request_id)) == ANSWER
        assert pool.connection.call(Length(stream)) == 0


def test_requests_of_a_gateway_that_stays_away_are_cancelled(pool: Pool) -> None:
    other = b"H" * 16
    pool.connection.call(Hello(other, SessionKind.GATEWAY, "other", "", 60_000))
    service = pool.detokenizer_service(session_ttl_s=0.5, orphan_grace_s=0.5)
    with running(service):
        orphan, moved = pool.open(1), pool.open(2)
        pool.connection.call(Attach(moved, "tenant", other, b""))
        pool.connection.call(Leave(GATEWAY))
        eventually(lambda: pool.fetch(orphan).cancel_reason == int(CancelReason.CLIENT))
        assert service.stats().num_orphans == 1
        assert pool.fetch(moved).cancel_reason == 0


def test_a_live_request_can_be_followed(pool: Pool) -> None:
    service = pool.detokenizer_service()
    ids = pool.ids(ANSWER)
    servicer = DetokenizerServicer(service.followers)

    async def follow(request_id: bytes, offset: int) -> list[TextRow]:
        call = detokenizer_pb2.DetokenizerStreamCall(request_id=request_id.hex(), from_offset=offset)
        deltas = []
        async for delta in servicer.Stream(call, None):
            deltas.append(delta)
            if len(deltas) == 1:
                rest = pool.rows(request_id, ids[4:], before=ids[:4], end=FinishReason.LENGTH)
                await asyncio.to_thread(pool.commit, rest)
        return deltas

    with running(service):
        request_id = pool.open(1)
        pool.commit(pool.rows(request_id, ids[:4]))
        eventually(pool.read_text)
        deltas = asyncio.run(follow(request_id, 2))
        assert [delta.token_offset for delta in deltas] == [2, 4]
        sent = pool.tokenizer.decode(ids[:2])
        assert sent + "".join(delta.text for delta in deltas) == ANSWER
        assert np.frombuffer(deltas[0].token_ids, "<u4").tolist() == ids[2:4]
        assert deltas[-1].usage.output_tokens == len(ids)
        with pytest.raises(PenstockError, match="no live request") as caught:
            asyncio.run(follow(request_id, 0))
        assert caught.value.code is ErrorCode.NOT_FOUND
        with pytest.raises(PenstockError, match="32 hexadecimal"):
            asyncio.run(follow(b"??", 0))
