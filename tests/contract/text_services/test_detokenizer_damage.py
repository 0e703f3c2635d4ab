"""What cannot be read ends the requests that it concerns, and no other."""

import pytest
from text_pipeline import ANSWER, SCHEDULER, Pool, eventually, running, text_of

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.finish import FinishReason
from contract.v1 import tokens_pb2
from gateway_svc.core.streams import ClientStream, Refusal
from servicekit.bus import keys as k
from servicekit.bus.calls import Append, Compact, Hello, LeaseShard, Leave, Reject, SessionKind
from tokenizer_svc import wire as tokenizer_wire


def damaged(*request_ids: bytes) -> bytes:
    """A batch that says whose it is, and no more that can be read."""
    batch = tokens_pb2.TokenBatch(request_ids=b"".join(request_ids), columns=b"\xff\xff\xff")
    return batch.SerializeToString()


@pytest.mark.parametrize("columns", [b"\xff\xff\xff", b"\x0a\x01x", b""])
def test_rows_that_cannot_be_read_end_the_requests_they_concern(pool: Pool, columns: bytes) -> None:
    with running(pool.detokenizer_service()):
        hit, other_shard, beside = pool.open(1), pool.open(2, shard=1), pool.open(3)
        ids = pool.ids("the mill")
        pool.commit(pool.rows(hit, ids[:1]))
        pool.commit(tokens_pb2.TokenBatch(request_ids=hit, columns=columns).SerializeToString())
        rows = pool.read_until_end(hit)
        assert rows[-1].error is not None
        assert rows[-1].error.code is ErrorCode.INTERNAL
        pool.generate(other_shard, ANSWER, shard=1)
        assert text_of(pool.result(other_shard)) == ANSWER
        pool.generate(beside, ANSWER)
        assert text_of(pool.result(beside)) == ANSWER
        (letter,) = pool.entries(pool.bus.keys.dead)
        assert letter.fields[k.STREAM] == b"tokens"
        assert {hint.fields[k.REQUEST] for hint in pool.entries(pool.bus.keys.cancels)} == {hit}


@pytest.mark.parametrize("payload", [b"\xff\xff\xff", b"", b"x" * 1000, b"\x2a\x01x"])
def test_an_entry_that_is_nobodys_ends_nobody(pool: Pool, payload: bytes) -> None:
    """Whoever wrote it: schedulers say whose their rows are."""
    with running(pool.detokenizer_service()):
        begun, new = pool.open(1), pool.open(2)
        ids = pool.ids(ANSWER)
        pool.commit(pool.rows(begun, ids[:2]))
        pool.connection.call(Append(pool.bus.keys.tokens(0), {k.PAYLOAD: payload}))
        pool.commit(pool.rows(begun, ids[2:], before=ids[:2], end=FinishReason.LENGTH))
        pool.generate(new, ANSWER)
        assert text_of(pool.result(begun)) == text_of(pool.result(new)) == ANSWER
        (letter,) = pool.entries(pool.bus.keys.dead)
        assert letter.fields[k.PAYLOAD] == payload


def test_a_request_whose_rows_were_nobodys_entry_ends_when_that_is_seen_and_alone(pool: Pool) -> None:
    with running(pool.detokenizer_service()):
        hit, beside = pool.open(1), pool.open(2)
        ids = pool.ids(ANSWER)
        pool.commit(pool.rows(hit, ids[:2]))
        pool.commit(b"\xff\xff\xff")  # it was rows of `hit`, before it was damaged
        pool.commit(pool.rows(beside, ids[:1]))
        pool.commit(pool.rows(hit, ids[3:4], before=ids[:3]))
        rows = pool.read_until_end(hit)
        assert rows[-1].error is not None
        assert rows[-1].error.code is ErrorCode.INTERNAL
        pool.commit(pool.rows(beside, ids[1:], before=ids[:1], end=FinishReason.LENGTH))
        assert text_of(pool.result(beside)) == ANSWER
        assert {hint.fields[k.REQUEST] for hint in pool.entries(pool.bus.keys.cancels)} == {hit}


def test_damage_ends_all_samples_for_a_client_that_has_parts_of_them(pool: Pool) -> None:
    ids = pool.ids(ANSWER)
    stream = ClientStream(2)
    with running(pool.detokenizer_service()):
        request_id = pool.open(1, n=2)
        pool.commit(pool.rows(request_id, ids[:4]))
        for row in eventually(pool.read_text):
            assert not isinstance(stream.accept(row), Refusal)
        pool.commit(damaged(request_id))
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
