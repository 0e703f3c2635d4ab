"""Random sequences of calls get the same answers in memory and on a server."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from bus_flow import AWKWARD, DEAD_MS, LONG_MS, id_of, seem_restarted, seem_settled, sid_of
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from memory_bus import MemoryBus

from contract.domain.errors import PenstockError
from servicekit.bus import Bus, Connection, open_bus
from servicekit.bus import calls as c
from servicekit.bus import keys as k
from servicekit.roster import Roster

_FORGOTTEN_MS = -60_001
_runs = itertools.count(1)

sids = st.sampled_from([sid_of(number) for number in range(4)])
request_ids = st.sampled_from([id_of(number) for number in range(3)])
tenants = st.sampled_from(["one", "two"])
shards = st.sampled_from([0, 1])
models = st.sampled_from([b"model--1", b"model--2", b"\r\n\0\xff:{}3"])
workers = st.sampled_from(["w1", "w2"])
routes = st.sampled_from([sid_of(2), sid_of(3), b""])
ttls_ms = st.sampled_from([LONG_MS, LONG_MS, LONG_MS, DEAD_MS, _FORGOTTEN_MS])
shapes = st.sampled_from(
    [(), (), (("num_shards", "4"),), (("num_shards", "4"), ("vocabulary", "a")), (("num_shards", "8"),)]
)
payloads = st.sampled_from([b"", b"payload", AWKWARD])
positions = st.integers(0, 3)
kinds = st.sampled_from(list(c.SessionKind))
amounts = st.integers(0, 3)
deadlines_ns = st.sampled_from([0, 0, 10**9, 10**19])  # none, long ago, in centuries
bounds = st.builds(c.Bounds, amounts, amounts, amounts, amounts)
meters = st.builds(
    lambda key, leader, rpm, tpm, most, tokens, several: c.Metered(
        key, leader, rpm, tpm, most, tokens, tokens * several, several
    ),
    *(st.sampled_from([b"key-1234", b"key-5678"]), request_ids, amounts, st.integers(0, 12), amounts),
    *(st.integers(0, 6), st.integers(1, 3)),
)
started = st.lists(request_ids, max_size=2).map(b"".join)
terms = st.sampled_from([0, 0, 0, 1, 2])
used = st.sampled_from([(), (0,), (3,), (9,)])
kept_ms = st.sampled_from([LONG_MS, LONG_MS, 0])
traces = st.sampled_from([(), (b"",), (b"trace" + AWKWARD,)])
witnesses = st.lists(st.sampled_from([b"", b"aaaa", b"aaaabbbb", b"aaaacccc"]), min_size=1, max_size=3).map(tuple)


class Restart(c.Call[None]):
    """The server seems to be another run: the next hello notices it."""


class Wait(c.Call[None]):
    """So much time passes as a pool settles at least."""


@dataclass
class Side:
    """One of the two buses, with its own names for entries."""

    bus: Bus
    connection: Connection
    restart: Callable[[], None]
    wait: Callable[[], None]
    hints: list[bytes] = field(default_factory=list)
    roster: Roster = field(default_factory=Roster)
    _numbers: dict[tuple[bytes, bytes], int] = field(default_factory=dict)

    def hint(self, position: int) -> bytes:
        """An entry of `prompts` that was read, or none."""
        return self.hints[-1 - position] if position < len(self.hints) else b""

    def entry_id(self, stream: bytes, position: int) -> bytes:
        """The id of an entry of a stream, counted from its end."""
        entries = self.connection.call(c.Read({stream: b"0-0"}, count=10_000)).get(stream, [])
        return entries[-1 - position].entry_id if position < len(entries) else b"0-0"

    def ask(self, call: c.Call[Any]) -> Any:
        """The answer, with entry ids replaced by numbers in order of their appearance."""
        keys = self.bus.keys
        match call:
            case Restart():
                return self.restart()
            case Wait():
                return self.wait()
        if isinstance(call, c.Survey):
            return self._survey()
        try:
            answer = self.connection.call(call)
        except PenstockError as error:  # a hello that is refused
            return error.message
        match call:
            case c.Submit() if isinstance(answer, c.Overload):
                answer = replace(answer, wait_ms=0)  # the two clocks differ
            case c.Submit() if isinstance(answer, c.OverLimit):
                answer = answer.limit is c.Limit.RUNNING  # which of the others is the longer wait is the clocks' too
            case c.Claim() if isinstance(answer, c.Claimed):
                answer = list(answer), answer.num_buried, answer.num_coming, answer.sent_ns
            case c.DropStream() | c.ListSessions():  # a stream that begins again in the same millisecond reuses its ids
                self._numbers.clear()
            case c.Append() | c.LastId():
                answer = self._number(call.stream, answer)
            case c.RegisterWorker() if answer:
                answer = self._number(keys.steps(call.worker), answer)
            case c.Pair() if isinstance(answer, c.Pairing):
                results_after = self._number(keys.results(call.worker), answer.results_after)
                answer = (answer.incarnation, answer.info, results_after)
            case c.ReadGroup() | c.Reclaim():
                self.hints.extend(entry.entry_id for entry in answer)
                answer = self._entries(call.stream, answer)
            case c.Read():
                answer = {stream: self._entries(stream, entries) for stream, entries in answer.items()}
            case c.Load() if isinstance(answer, c.Loaded):
                logs = {shard: self._entries(keys.tokens(shard), log) for shard, log in answer.log.items()}
                answer = (answer.requests, logs, answer.checkpoints)
        return answer

    def _survey(self) -> Any:
        """What is known after it, by what changed since the last one."""
        self._numbers.clear()  # what is forgotten, begins again
        while not self.roster.note(self.connection.call(replace(self.roster.survey(), count=3)), 0.0):
            pass
        return self.roster.sessions(0.0), self.roster.workers()

    def _entries(self, stream: bytes, entries: list[c.Entry]) -> list[tuple[int, dict[bytes, bytes]]]:
        return [(self._number(stream, entry.entry_id), entry.fields) for entry in entries]

    def _number(self, stream: bytes, entry_id: bytes) -> int:
        return -1 if entry_id == b"0-0" else self._numbers.setdefault((stream, entry_id), len(self._numbers))


Step = Callable[[Side], list[c.Call[Any]]]  # the calls may need what this side has read before


def _fixed(*calls: c.Call[Any]) -> Step:
    return lambda _: list(calls)


def _simple(kind: type[c.Call[Any]], *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    return st.builds(kind, *arguments).map(_fixed)


def _submit(
    request_id: bytes,
    tenant: str = "one",
    digest: bytes = b"d",
    *,
    num_tokens: int = 3,
    deadline_ns: int = 0,
    bounds: c.Bounds = c.Bounds(),  # noqa: B008  (a value)
    metered: c.Metered | None = None,
) -> c.Submit:
    return c.Submit(
        *(request_id, tenant, b"header", b"body" + AWKWARD, digest, sid_of(3), 7, b"reply"),
        num_tokens=num_tokens,
        deadline_ns=deadline_ns,
        bounds=bounds,
        metered=metered,
        prompt=b"prompt" + AWKWARD,
    )


def _memory_side(pool: str) -> Side:
    passed_ms = 0

    def wait() -> None:
        nonlocal passed_ms
        passed_ms += k.SETTLE_MS

    bus = MemoryBus(pool, lambda: time.time_ns() // 1_000_000 + passed_ms)
    connection = bus.connect()

    def restart() -> None:
        bus.stop()
        bus.start()
        connection.reconnect()

    return Side(bus, connection, restart, wait)


def _server_side(url: str, pool: str) -> Side:
    bus = open_bus(url, pool)
    return Side(bus, bus.connect(), lambda: seem_restarted(url, bus.keys), lambda: seem_settled(url, bus.keys))


def _ready(request_id: bytes) -> Step:
    def step(side: Side) -> list[c.Call[Any]]:
        side.connection.call(_submit(request_id))
        side.ask(c.ReadGroup(side.bus.keys.prompts, k.TOKENIZERS, b"t", 10))
        return [c.Tokenized(request_id, side.hint(0), b"meta", 8, 5, b"tokens" + AWKWARD)]

    return step


def _running(request_id: bytes, sid: bytes, shard: int) -> Step:
    return lambda side: [*_ready(request_id)(side), c.Claim(sid, 5, shard)]


def _retire(sid: bytes, shard: int, request_id: bytes, ttl_ms: int, route: bytes, **told: Any) -> Step:
    retire = c.Retire(sid, shard, request_id, b"result", ttl_ms, route, **told)
    return _fixed(c.LeaseShard(sid, shard), retire)


def _ended(request_id: bytes, shard: int, ttl_ms: int, route: bytes, **told: Any) -> Step:
    owner, detokenizer = sid_of(0), sid_of(1)
    retire = _retire(detokenizer, shard, request_id, ttl_ms, route, **told)
    return lambda side: [*_running(request_id, owner, shard)(side), *retire(side)]


def _compact(sid: bytes, shard: int, checkpoints: tuple[tuple[bytes, bytes], ...], position: int) -> Step:
    return lambda side: [c.Compact(sid, shard, side.entry_id(side.bus.keys.tokens(shard), position), checkpoints)]


def _compacted(sid: bytes, request_id: bytes, shard: int) -> Step:
    compact = _compact(sid, shard, ((request_id, b"rows" + AWKWARD),), 0)
    return lambda side: [
        *_running(request_id, sid, shard)(side),
        c.LeaseShard(sid, shard),
        *compact(side),
        c.Load(sid, (request_id,)),
        c.ReadCheckpoints(sid, shard),
    ]


def _take(sid: bytes, dead: bytes) -> Step:
    return _fixed(c.Renew(dead, DEAD_MS), c.Take(sid, dead), c.Load(sid, tuple(id_of(number) for number in range(3))))


def _named(
    stream: str, make: Callable[..., c.Call[Any]], *arguments: st.SearchStrategy[Any]
) -> st.SearchStrategy[Step]:
    """A call about a stream of the pool."""
    return st.tuples(*arguments).map(lambda values: lambda side: [make(side.bus.keys.key(stream), *values)])


steps: st.SearchStrategy[Step] = st.one_of(
    request_ids.map(_ready),
    st.builds(_running, request_ids, sids, shards),
    st.builds(_running, request_ids, sids, shards),
    st.builds(_retire, sids, shards, request_ids, kept_ms, routes, tokens=used, traces=traces),
    st.builds(_ended, request_ids, shards, kept_ms, routes, tokens=used, traces=traces),
    st.builds(_take, sids, sids),
    st.builds(c.Hello, sids, kinds, st.just("näme"), st.just("host:1"), ttls_ms, st.booleans(), shapes, terms).map(
        _fixed
    ),
    _simple(c.Revalidate, sids, ttls_ms),
    _simple(c.Renew, sids, ttls_ms, payloads, st.booleans()),
    _simple(c.Leave, sids),
    _simple(c.ListSessions),
    _simple(c.ReadStatus, sids),
    _simple(c.Survey),
    _simple(c.Survey),
    st.builds(
        _submit,
        *(request_ids, tenants, st.sampled_from([b"d", b"e"])),
        num_tokens=amounts,
        deadline_ns=deadlines_ns,
        bounds=bounds,
    ).map(_fixed),
    st.builds(_submit, request_ids, num_tokens=amounts, metered=meters).map(_fixed),
    st.builds(_submit, request_ids, num_tokens=amounts, metered=meters).map(_fixed),
    st.builds(_submit, request_ids, tenants, st.sampled_from([b"d", b"d", b"e"]), metered=st.none() | meters).flatmap(
        lambda submit: witnesses.map(lambda witness: _fixed(replace(submit, witness=witness, model_digest=b"model--1")))
    ),
    st.builds(c.Hello, sids, kinds, st.just("g"), st.just(""), ttls_ms, st.just(value=False)).map(
        lambda hello: _fixed(Restart(), hello)
    ),
    st.just(_fixed(Wait())),
    _simple(c.Fetch, request_ids),
    st.tuples(request_ids, positions, payloads).map(
        lambda v: lambda side: [c.Tokenized(v[0], side.hint(v[1]), v[2], 8, 4)]
    ),
    st.tuples(request_ids, positions, shards, payloads).map(
        lambda v: lambda side: [c.Reject(v[0], side.hint(v[1]), v[2], v[3])]
    ),
    _simple(c.Claim, sids, st.integers(1, 3), shards),
    _simple(c.Take, sids, sids),
    _simple(
        c.Strike,
        sids,
        st.lists(st.builds(c.Struck, request_ids, st.integers(0, 9), st.integers(0, 2**32)), max_size=3).map(tuple),
    ),
    _simple(c.Owned, sids),
    _simple(c.Load, sids, st.lists(request_ids, max_size=3).map(tuple)),
    _simple(c.Commit, sids, st.lists(st.tuples(shards, payloads), max_size=3).map(tuple), workers, payloads, started),
    _simple(c.Overdue, st.integers(1, 3)),
    _simple(c.CountWaiting, tenants),
    _simple(c.Recall, request_ids, tenants),
    _simple(c.Delivered, st.lists(st.tuples(request_ids, st.integers(1, 2**63)), max_size=3).map(tuple)),
    _simple(c.Attach, request_ids, tenants, routes, payloads, routes, st.integers(0, 3)),
    _simple(
        c.Cancel, request_ids, st.integers(1, 5), st.just(9), st.none() | tenants, st.sampled_from([-1, -1, 0]), routes
    ),
    _simple(c.RegisterWorker, sids, workers, payloads, models),
    _simple(c.Renew, sids, ttls_ms, payloads, st.booleans(), st.lists(models, max_size=2).map(b"".join)),
    _simple(c.HandOver, sids, sids, st.lists(request_ids, max_size=3).map(tuple)),
    _simple(c.ListWorkers),
    _simple(c.Pair, sids, workers),
    _simple(c.Unpair, sids, workers),
    _simple(c.LeaseShard, sids, shards, st.booleans(), amounts),
    _simple(c.ListShards),
    _simple(c.LogBacklogs, st.lists(shards).map(tuple)),
    _simple(c.ReleaseShard, sids, shards),
    st.builds(_compact, sids, shards, st.lists(st.tuples(request_ids, payloads), max_size=3).map(tuple), positions),
    st.builds(_compacted, sids, request_ids, shards),
    _simple(c.ReadCheckpoints, sids, shards, request_ids | st.just(b""), st.integers(1, 3)),
    _named("prompts", c.ReadGroup, st.just(k.TOKENIZERS), st.sampled_from([b"t1", b"t2"]), st.integers(1, 3)),
    _named(
        "prompts",
        c.Reclaim,
        st.just(k.TOKENIZERS),
        st.sampled_from([b"t1", b"t2"]),
        st.sampled_from([0, LONG_MS]),
        st.integers(1, 3),
    ),
    positions.map(lambda p: lambda side: [c.Acknowledge(side.bus.keys.prompts, k.TOKENIZERS, side.hint(p) or b"1-1")]),
    _named("requests", c.Append, request_ids.map(lambda request_id: {k.REQUEST: request_id, k.SENT_NS: b"1"})),
    _named("free", c.Append, st.dictionaries(st.sampled_from([b"a", AWKWARD]), payloads, min_size=1)),
    positions.map(
        lambda p: (
            lambda side: [
                c.Read(
                    {name: side.entry_id(name, p) for name in (side.bus.keys.key("free"), side.bus.keys.tokens(0))}, 2
                )
            ]
        )
    ),
    _named("free", c.LastId),
    _named("free", c.DropStream),
)


def _what_is_left(key: bytes) -> list[c.Submit]:
    """Calls that are refused if a key has used so much: what it has used can be seen by which of them are."""
    limits = ((1, 0, 0), (2, 0, 0), (0, 4, 0), (0, 8, 0), (0, 16, 0), (0, 0, 1), (0, 0, 2))
    return [
        _submit(id_of(9 + number), metered=c.Metered(key, id_of(9 + number), *each, call_tokens=1))
        for number, each in enumerate(limits)
    ]


def _everything(side: Side) -> list[Any]:
    """All that can be seen of a pool."""
    keys = side.bus.keys
    names = [keys.prompts, keys.requests, keys.cancels, keys.traces, keys.key("free")]
    names += [name(shard) for name in (keys.tokens, keys.attach) for shard in (0, 1)]
    names += [name(worker) for name in (keys.steps, keys.results) for worker in ("w1", "w2")]
    names += [keys.text(sid_of(number)) for number in range(4)]
    return [
        side.ask(c.Read(dict.fromkeys(names, b"0-0"), count=10_000)),
        *(side.ask(c.LastId(name)) for name in names),
        *(side.ask(c.Length(name)) for name in names),
        *(side.ask(c.Fetch(id_of(number))) for number in range(3)),
        *(side.ask(c.Owned(sid_of(number))) for number in range(4)),
        *(side.ask(c.ReadCheckpoints(sid_of(number), shard)) for number in range(4) for shard in (0, 1)),
        *(side.ask(c.CountWaiting(tenant)) for tenant in ("one", "two")),
        side.ask(c.Overdue(10)),
        side.ask(c.CountUntold()),
        side.ask(c.LogBacklogs((0, 1))),
        side.ask(c.ListWorkers()),
        side.ask(c.Survey()),
        side.ask(c.ListSessions()),
        side.ask(c.ListWorkers()),
        *(side.ask(call) is c.SubmitOutcome.CREATED for key in (b"key-1234",) for call in _what_is_left(key)),
    ]


@pytest.fixture(params=["valkey", "redis"])
def server_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.mark.timeout(7200)  # many examples, each of many calls: a machine that has others to serve takes long
@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(sequence=st.lists(steps, min_size=10, max_size=50))
def test_memory_and_server_answer_alike(server_url: str, sequence: list[Step]) -> None:
    pool = f"equivalence-{next(_runs)}"
    sides = [_memory_side(pool), _server_side(server_url, pool)]
    try:
        for number in range(2):
            for side in sides:
                side.ask(c.Hello(sid_of(number), c.SessionKind.SCHEDULER, "s", "", LONG_MS))
        for step in sequence:
            memory_calls, server_calls = (step(side) for side in sides)
            for memory_call, server_call in zip(memory_calls, server_calls, strict=True):
                expected, answer = sides[0].ask(memory_call), sides[1].ask(server_call)
                assert answer == expected, memory_call
                event(f"{type(memory_call).__name__}: {'nothing' if not expected else 'something'}")
        assert _everything(sides[1]) == _everything(sides[0])
    finally:
        for side in sides:
            side.connection.close()
