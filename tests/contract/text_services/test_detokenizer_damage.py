"""What cannot be read ends the requests that it concerns, and no other."""

import pytest
from text_pipeline import ANSWER, SCHEDULER, Pool, eventually, running, text_of

from gateway_svc.core.streams import ClientStream, Refusal
from penstock.domain.errors import ErrorCode, PenstockError
from penstock.domain.finish import FinishReason
from servicekit.bus import keys as k
from servicekit.bus.calls import Append, Compact, Hello, LeaseShard, Leave, Reject, SessionKind
from tokenizer_svc import wire as tokenizer_wire


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
