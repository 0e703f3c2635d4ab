"""Commits, compactions and take-overs in any order give what an undisturbed run gives, and nothing is left behind."""

import itertools
import random
from pathlib import Path
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st
from log_actors import SHARD, Reader, Writer, orders_of, place
from text_pipeline import GATEWAY, Pool

from contract.v1 import text_pb2
from detokenizer_svc import wire
from servicekit.bus import open_bus
from servicekit.bus.calls import Attach, Length, Owned, ReadCheckpoints

_ACTS = [
    *("place", "step", "step", "step", "read", "read", "flush", "compact", "compact unheard"),
    *("writer takes", "writer loads", "reader takes", "reader leaves", "late step", "late read", "late compact"),
    "late look",
]
_END = 400  # turns in which everything must have ended


class _Run:
    """The actors; the last of each kind is the one that should be at work."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.waiting = orders_of(pool)
        self.orders: dict[bytes, Any] = {}
        self.writers = [Writer(pool, self.orders)]
        self.readers: list[Reader] = []
        self._sids = (b"%016d" % number for number in itertools.count())

    def act(self, name: str, number: int) -> None:
        match name:
            case "place" if self.waiting:
                self.place()
            case "step":
                self.writers[-1].step(number)
            case "writer takes":
                self.writers.append(Writer(self.pool, self.orders, next(self._sids)))
                self.writers[-1].take(self.writers[-2].sid)
            case "writer loads":
                self.writers[-1].load()
            case "reader takes":
                self.take_shard()
            case "late step":
                self.writers[number % len(self.writers)].step(number)
            case "read" | "flush" | "compact" | "compact unheard" | "reader leaves" if self.readers:
                self._read(name, self.readers[-1], number)
            case "late read" | "late compact" | "late look" if self.readers:
                self._read(name.removeprefix("late "), self.readers[number % len(self.readers)], number)

    def place(self) -> None:
        order = place(self.pool, self.writers[-1], len(self.orders) + 1, self.waiting.pop())
        self.orders[order.request_id] = order

    def take_shard(self) -> None:
        dead = self.readers[-1].sid if self.readers else None
        self.readers.append(Reader(self.pool, self.orders, next(self._sids)))
        self.readers[-1].take(dead)

    def _read(self, name: str, reader: Reader, number: int) -> None:
        match name:
            case "read":
                reader.read(1 + number % 4)
            case "flush":
                reader.flush()
            case "compact":
                reader.compact()
            case "compact unheard":
                reader.compact(hears=False)
            case "look" if not reader.still_leases():
                self.readers.remove(reader)
            case "reader leaves":
                reader.release()

    def finish(self, *, new_writers: bool) -> int:
        """Goes on until everything has ended, with a take-over every few turns; how many checkpoints there were.

        A new writer heals what is wrong about checkpoints: it generates again what it does not find.
        """
        num_checkpoints = 0
        self.act("writer loads", 0)
        for turn in range(_END):
            if turn % 6 == 0:
                self.take_shard()
            if new_writers and turn % 10 == 9:
                self.act("writer takes", 0)
                self.act("compact", 0)
                self.act("writer loads", 0)
            goes_on = self.writers[-1].step(turn)
            reader = self.readers[-1]
            num_read = reader.read(2)
            if turn % 6 == 4:
                reader.release()
            late = self.readers[-3:-1]
            for each in late:
                if each.still_leases():
                    assert each is reader
                each.read(4)
                each.compact()
            if turn % 6 < 4:
                reader.compact()
                num_checkpoints += len(self.pool.connection.call(ReadCheckpoints(reader.sid, SHARD)) or ())
                if not goes_on and not num_read:
                    return num_checkpoints
        raise AssertionError(f"{_END} turns were not enough")


@settings(max_examples=100)
@given(
    acts=st.lists(st.tuples(st.sampled_from(_ACTS), st.integers(0, 1 << 16)), max_size=60), new_writers=st.booleans()
)
def test_any_interleaving_gives_what_an_undisturbed_run_gives(
    model: Path, acts: list[tuple[str, int]], new_writers: bool
) -> None:
    event(f"checkpoints: {_live(_Run(Pool(model)), acts, new_writers=new_writers)}")


def test_it_is_the_same_on_a_server(model: Path, valkey: str) -> None:
    for seed in range(6):
        dice = random.Random(seed)
        acts = [(dice.choice(_ACTS), dice.randrange(1 << 16)) for _ in range(50)]
        _live(_Run(Pool(model, open_bus(valkey, f"pool-{seed}"))), acts, new_writers=bool(seed % 2))


def without_times(result: bytes | None) -> text_pb2.FinishedRequest:
    finished = text_pb2.FinishedRequest.FromString(result or b"")
    finished.ClearField("timeline")
    return finished


def _live(run: _Run, acts: list[tuple[str, int]], *, new_writers: bool) -> bool:
    """A whole run; whether it had checkpoints on its way to the end."""
    for name, number in acts:
        run.act(name, number)
    while run.waiting:
        run.place()
    has_checkpoints = run.finish(new_writers=new_writers) > 0
    writer, reader, connection = run.writers[-1], run.readers[-1], run.pool.connection
    for request_id, order in run.orders.items():
        found = connection.call(Attach(request_id, "tenant", GATEWAY, b""))
        assert without_times(found.result) == without_times(wire.encode_finished(order.expected))
        assert order.client.stream.ended
        assert order.client.texts == [sequence.text for sequence in order.expected.sequences]
        assert order.client.token_ids == [sequence.token_ids.tolist() for sequence in order.expected.sequences]
    assert connection.call(ReadCheckpoints(reader.sid, SHARD)) == []
    assert connection.call(Owned(writer.sid)) == []
    assert connection.call(Length(run.pool.bus.keys.tokens(SHARD))) == 0
    connection.close()
    return has_checkpoints
