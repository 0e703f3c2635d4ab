"""A connection that looks for answers without sleeping behaves as any other."""

import threading
import time

import pytest

from servicekit.bus import open_bus
from servicekit.bus.calls import Append, LastId, Read

BUSY_POLL_S = 0.02


@pytest.mark.parametrize("delay_s", [0.0, BUSY_POLL_S / 2, BUSY_POLL_S * 3])
@pytest.mark.parametrize(("always_s", "awake_s"), [(BUSY_POLL_S, 0.0), (0.0, BUSY_POLL_S)])
def test_an_answer_is_taken_whether_it_comes_while_polling_or_later(
    valkey_url: str, pool: str, always_s: float, awake_s: float, delay_s: float
) -> None:
    bus = open_bus(valkey_url, pool, busy_poll_s=always_s)
    reader, writer = bus.connect(), bus.connect()
    stream = bus.keys.results("w")
    after = reader.call(LastId(stream))

    def write() -> None:
        time.sleep(delay_s)
        writer.call(Append(stream, {b"p": b"found"}))

    thread = threading.Thread(target=write)
    thread.start()
    found = reader.call(Read({stream: after}, block_ms=600_000, awake_s=awake_s))
    thread.join()
    assert [entry.fields for entry in found[stream]] == [{b"p": b"found"}]
    assert reader.call(Read({stream: found[stream][-1].entry_id}, block_ms=1)) == {}
    reader.close()
    writer.close()
