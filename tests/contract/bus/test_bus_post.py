"""What is posted arrives, and nobody waits for its answer."""

import asyncio

from servicekit.bus import Bus
from servicekit.bus.calls import Append, LastId, Length


def test_what_is_posted_is_carried_out_before_what_is_asked_afterwards(bus: Bus) -> None:
    async def ask() -> tuple[int, bytes]:
        connection = await bus.connect_async()
        length, _ = await connection.execute([Length(bus.keys.bell), LastId(bus.keys.bell)])
        assert length == 0
        connection.post(Append(bus.keys.bell, {b"t": b"1"}, 1))
        connection.post(Append(bus.keys.bell, {b"t": b"2"}, 1))
        answers = await connection.execute([Length(bus.keys.bell), LastId(bus.keys.bell)])
        await connection.close()
        connection.post(Append(bus.keys.bell, {b"t": b"3"}, 1))
        return answers[0], answers[1]

    length, last = asyncio.run(ask())
    assert length >= 1
    assert last != b"0-0"
