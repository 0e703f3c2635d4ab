"""What the detokenizer's loop is about to write, where the server is full."""

from detokenizer_log import Log, opened
from structlog.testing import capture_logs
from tokenizers_under_test import byte_level

from contract.domain.finish import FinishReason
from detokenizer_svc.core.detokenizer import Detokenizer
from detokenizer_svc.core.effects import Effects
from detokenizer_svc.core.stats import DetokenizerStats
from detokenizer_svc.gateways import Gateways
from detokenizer_svc.metrics import ServiceStats
from detokenizer_svc.outbox import MANY_ENDS, TextOutbox
from detokenizer_svc.shard import Shard
from servicekit.bus import keys as k
from servicekit.bus.calls import Append, Entry, Retire
from servicekit.bus.keys import Keys


def test_who_has_ended_waits_until_asked_for_is_retired_once_or_forgotten() -> None:
    names, detokenizer = Keys("pool"), Detokenizer(byte_level())
    shards = [Shard(number, names, detokenizer) for number in range(2)]
    outbox = TextOutbox(names, Gateways(1.0, 1.0), 60.0, ServiceStats(DetokenizerStats()))

    def put(number: int, shard: Shard) -> bytes:
        request = opened(bytes([number]) * 16)
        detokenizer.open(request, b"g" * 16)
        ended = detokenizer.push(Log(request).add(0, [5], FinishReason.LENGTH).batch())
        outbox.put_ended(shard, ended.retirements)
        return request.request_id

    ids = [put(number, shards[number % 2]) for number in range(1, 7)]
    outbox.retire(b"s" * 16, 2)
    outbox.forget(shards[0])
    outbox.retire(b"s" * 16)
    retired = [call for call in outbox.calls if isinstance(call, Retire)]
    assert [(call.shard, call.request_id, len(call.others)) for call in retired] == [
        (1, ids[0], 0),
        (0, ids[1], 0),
        (1, ids[2], 1),
    ]
    put(7, shards[1])
    outbox.clear()
    assert (outbox.calls, outbox.num_ended) == ([], 0)


def test_no_call_retires_more_than_a_few() -> None:
    names, detokenizer = Keys("pool"), Detokenizer(byte_level())
    shard = Shard(0, names, detokenizer)
    outbox = TextOutbox(names, Gateways(1.0, 1.0), 60.0, ServiceStats(DetokenizerStats()))
    ids = [bytes([number]) * 16 for number in range(2 * MANY_ENDS + 1)]
    for request in map(opened, ids):
        detokenizer.open(request, b"g" * 16)
        ended = detokenizer.push(Log(request).add(0, [5], FinishReason.LENGTH).batch())
        outbox.put_ended(shard, ended.retirements)
    outbox.retire(b"s" * 16)
    retired = [(call.request_id, *(each for each, _ in call.others)) for call in outbox.calls]
    assert [len(each) for each in retired] == [MANY_ENDS, MANY_ENDS, 1]
    assert [request_id for each in retired for request_id in each] == ids


def test_a_gateway_that_is_gone_is_not_told_of_a_result() -> None:
    gateways, here, gone = Gateways(1.0, 1.0), b"h" * 16, b"g" * 16
    names = Keys("pool")
    outbox = TextOutbox(names, gateways, 60.0, ServiceStats(DetokenizerStats()))
    gateways.note([], [gone], 0.0)
    shard = Shard(0, names, Detokenizer(byte_level()))
    outbox.put(b"s" * 16, shard, Effects(results=[(gone, b"r" * 16), (here, b"r" * 16)]))
    assert outbox.calls == [Append(names.text(here), {k.REQUEST: b"r" * 16}, k.TEXT_CAP)]


def test_a_full_server_is_sent_results_alone_and_lost_letters_are_told() -> None:
    names = Keys("pool")
    outbox = TextOutbox(names, Gateways(1.0, 1.0), 60.0, ServiceStats(DetokenizerStats()))
    retire = Retire(b"s" * 16, 0, b"r" * 16, b"result", 1)
    outbox.calls = [Append(names.text(b"g" * 16), {b"payload": b"text"}), retire]
    outbox.put_letter(Entry(b"1-0", {}), "tokens", "not a TokenBatch")
    with capture_logs() as logs:
        outbox.drop_text()
    assert outbox.calls == [retire]
    assert [(line["event"], line["count"]) for line in logs] == [("dead letters were not kept", 1)]
