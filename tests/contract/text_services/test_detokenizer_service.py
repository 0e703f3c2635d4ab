"""The detokenizer on a bus: text for gateways and followers, ends for requests."""

import asyncio

import numpy as np
import pytest
from text_pipeline import ANSWER, GATEWAY, SCHEDULER, Pool, eventually, running, text_of

from contract.domain import chain
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.finish import CancelReason, FinishReason, Usage
from contract.domain.request import Prompt
from contract.domain.rows import TextRow
from contract.v1 import detokenizer_pb2
from detokenizer_svc.servicer import DetokenizerServicer
from gateway_svc import wire as gateway_wire
from gateway_svc.core.streams import DeliveredSequence
from servicekit.bus import keys as k
from servicekit.bus.calls import Append, Attach, DropStream, Hello, Leave, Length, Reject, SessionKind
from tokenizer_svc import wire as tokenizer_wire


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


def test_attaching_sends_the_rest_to_the_new_gateway(pool: Pool) -> None:
    other = b"H" * 16
    # Nothing is written to a gateway without a session, which is gone.
    pool.connection.call(Hello(other, SessionKind.GATEWAY, "other", "", 600_000))
    ids = pool.ids(ANSWER)
    with running(pool.detokenizer_service()):
        request_id = pool.open(1)
        pool.commit(pool.rows(request_id, ids[:4]))
        first = eventually(pool.read_text)
        known = chain.extend(chain.CHAIN_START, first[0].token_ids)
        state = DeliveredSequence(len(first[0].token_ids), len(first[0].text), known)
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


def test_a_gateway_that_comes_between_an_end_and_its_result_asks_again(pool: Pool) -> None:
    other = b"H" * 16
    with running(pool.detokenizer_service()):
        request_id = pool.open(1)
        pool.generate(request_id, ANSWER)
        assert text_of(pool.result(request_id)) == ANSWER
        # As `attach` writes it while the request is not retired.
        attachment = {k.REQUEST: request_id, k.ROUTE: other, k.OFFSETS: gateway_wire.encode_offsets([])}
        pool.connection.call(Append(pool.bus.keys.attach(0), attachment))
        (entry,) = eventually(lambda: pool.entries(pool.bus.keys.text(other)))
    assert entry.fields == {k.REQUEST: request_id}


def test_text_for_a_gateway_that_left_is_not_written(pool: Pool) -> None:
    service = pool.detokenizer_service(session_ttl_s=0.5)
    stream = pool.bus.keys.text(GATEWAY)
    with running(service):
        request_id = pool.open(1)
        pool.connection.execute([Leave(GATEWAY), DropStream(stream)])
        eventually(lambda: service._gateways.is_gone(GATEWAY))
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
