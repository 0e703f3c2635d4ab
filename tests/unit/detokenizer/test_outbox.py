"""What the detokenizer's loop is about to write, where the server is full."""

from structlog.testing import capture_logs

from detokenizer_svc.core.detokenizer import DetokenizerStats
from detokenizer_svc.gateways import Gateways
from detokenizer_svc.metrics import ServiceStats
from detokenizer_svc.outbox import Outbox
from servicekit.bus.calls import Append, Entry, Retire
from servicekit.bus.keys import Keys


def test_a_full_server_is_sent_results_alone_and_lost_letters_are_told() -> None:
    names = Keys("pool")
    outbox = Outbox(names, Gateways(1.0, 1.0), 60.0, ServiceStats(DetokenizerStats()))
    retire = Retire(b"s" * 16, 0, b"r" * 16, b"result", 1)
    outbox.calls = [Append(names.text(b"g" * 16), {b"payload": b"text"}), retire]
    outbox.put_letter(Entry(b"1-0", {}), "tokens", "not a TokenBatch")
    with capture_logs() as logs:
        outbox.drop_text()
    assert outbox.calls == [retire]
    assert [(line["event"], line["count"]) for line in logs] == [("dead letters were not kept", 1)]
