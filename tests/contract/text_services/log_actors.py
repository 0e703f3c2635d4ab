"""Who writes and who reads a shard of the log, one step at a time: any of them may stop for good or wake up late."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from text_pipeline import GATEWAY, SCHEDULER, TTL_MS, Pool

from contract.domain import chain
from contract.domain.errors import ErrorCode
from contract.domain.finish import FinishReason, RequestError
from contract.domain.plan import Logprobs
from contract.domain.rows import TextRow, TokenRows
from contract.domain.timeline import Computed
from detokenizer_svc import wire
from detokenizer_svc.core.detokenizer import Detokenizer
from detokenizer_svc.core.extent import LogLimits
from detokenizer_svc.core.request import FinishedRequest
from detokenizer_svc.rebuild import rebuild
from detokenizer_svc.shard import Shard, Taken
from gateway_svc.core.streams import ClientStream, Refusal
from scheduler_svc.wire import History, encode_rows, read_histories
from servicekit.bus import keys as k
from servicekit.bus.calls import (
    Call,
    Commit,
    Fetch,
    Hello,
    LeaseShard,
    Load,
    Read,
    ReleaseShard,
    Renew,
    Retire,
    SessionKind,
    Take,
)

SHARD = 0
LIMITS = LogLimits(num_entries=3, num_bytes=1 << 20)
NUM_CACHED = 2


@dataclass(frozen=True)
class Fate:
    """What becomes of one sequence, whoever computes it: its tokens, and its end with the last one or in a row of its
    own."""

    token_ids: list[int]
    finish: FinishReason
    with_last: bool = True
    error: RequestError | None = None


@dataclass
class Order:
    """A request and all that is to be known about it."""

    params: dict[str, Any]
    fates: list[Fate]
    request_id: bytes = b""
    num_committed: list[int] = field(default_factory=list)  # tokens of each sequence that certainly are in the log
    client: "Client" = field(init=False)
    expected: FinishedRequest = field(init=False)

    def check(self, histories: list[History]) -> None:
        """A load has lost nothing, or only what stands after a stop string."""
        for history, fate, num_tokens, sequence in zip(
            histories, self.fates, self.num_committed, self.expected.sequences, strict=True
        ):
            assert history.token_ids == fate.token_ids[: len(history.token_ids)]
            assert len(history.token_ids) >= min(num_tokens, len(sequence.token_ids))


class Client:
    """Takes text rows as a gateway does."""

    def __init__(self, n: int) -> None:
        self.stream = ClientStream(n)
        self.texts = [""] * n
        self.token_ids: list[list[int]] = [[] for _ in range(n)]

    def take(self, row: TextRow) -> None:
        new = self.stream.accept(row)
        if not isinstance(new, Refusal):
            self.texts[row.sequence] += new.text
            self.token_ids[row.sequence] += new.token_ids


class Writer:
    """A scheduler with its worker, as far as the log shows them."""

    def __init__(self, pool: Pool, orders: dict[bytes, Order], sid: bytes = SCHEDULER) -> None:
        self._pool, self._orders, self.sid = pool, orders, sid
        self._histories: dict[bytes, list[History]] = {}
        self._unloaded: list[bytes] = []
        if sid != SCHEDULER:
            pool.connection.call(Hello(sid, SessionKind.SCHEDULER, "scheduler", "", TTL_MS))

    def claimed(self, order: Order) -> None:
        self._histories[order.request_id] = [History() for _ in order.fates]

    def take(self, dead: bytes) -> None:
        """Between this and `load` there may be anything."""
        self._pool.connection.call(Renew(dead, -1))
        self._unloaded = self._pool.connection.call(Take(self.sid, dead)) or []

    def load(self) -> None:
        loaded = self._pool.connection.call(Load(self.sid, tuple(self._unloaded)))
        self._unloaded = []
        if loaded is None:
            return  # another one has taken over
        wanted = {each.request_id: len(self._orders[each.request_id].fates) for each in loaded.requests}
        logged = [entry.fields[k.PAYLOAD] for entry in loaded.log.get(SHARD, []) if k.PAYLOAD in entry.fields]
        found = read_histories([*loaded.checkpoints.values(), *logged], wanted)
        for request_id, histories in found.items():
            self._orders[request_id].check(histories)
        self._histories |= found

    def step(self, choice: int) -> bool:
        """Commits the next tokens of some of the sequences that go on; false if none does."""
        batches = [
            rows
            for request_id, histories in self._histories.items()
            for index, history in enumerate(histories)
            if not history.has_ended and (choice := _mixed(choice)) % 3
            for rows in [_next_row(self._orders[request_id], index, history, 1 + (choice >> 8) % 2)]
        ]
        if batches:
            payload = encode_rows(_joined(batches), self.sid, Computed(sent_ns=1))
            if self._pool.connection.call(Commit(self.sid, ((SHARD, payload),))):
                for request_id, histories in self._histories.items():
                    self._orders[request_id].num_committed = [len(history.token_ids) for history in histories]
        return any(not history.has_ended for each in self._histories.values() for history in each)


MODEL = b"model---"


def _mixed(choice: int) -> int:
    return chain.mix(choice) >> 16


def _next_row(order: Order, index: int, history: History, size: int) -> TokenRows:
    """One row after a history, which has it from now on."""
    fate, position, before = order.fates[index], len(history.token_ids), history.chain
    tokens = fate.token_ids[position : position + size]
    is_last = position + len(tokens) == len(fate.token_ids) and (fate.with_last or not tokens)
    finish = fate.finish if is_last else FinishReason.UNSPECIFIED
    history.take(position, before, finish, np.array(tokens, np.uint32), MODEL)
    return TokenRows(
        request_ids=[order.request_id],
        sequences=np.array([index], np.uint32),
        positions=np.array([position], np.uint32),
        chains=np.array([before], np.uint64),
        counts=np.array([len(tokens)], np.uint32),
        token_ids=np.array(tokens, np.uint32),
        finishes=np.array([finish], np.uint8),
        cached_tokens=np.array([0 if position or not tokens else NUM_CACHED], np.uint32),
        logprobs=_logprobs(tokens, asked="logprobs" in order.params),
        errors={0: fate.error} if is_last and fate.error else {},
        model_digest=MODEL,
    )


def _logprobs(token_ids: list[int], *, asked: bool) -> Logprobs:
    ids = np.array(token_ids, np.uint32)
    sampled = -ids.astype(np.float32) / 7 if asked else np.full(len(ids), np.nan, np.float32)
    counts = ids % 3 if asked else np.zeros(len(ids), np.uint32)
    top_ids = np.repeat(ids, counts)
    ranks = ids + np.uint32(1) if asked else np.zeros(len(ids), np.uint32)
    return Logprobs(sampled, ranks, counts, top_ids, -top_ids.astype(np.float32) / 5)


def _joined(batches: list[TokenRows]) -> TokenRows:
    def column(name: str) -> Any:
        return np.concatenate([getattr(each, name) for each in batches])

    def logprobs(name: str) -> Any:
        return np.concatenate([getattr(each.logprobs, name) for each in batches])

    return TokenRows(
        [each.request_ids[0] for each in batches],
        *(column(name) for name in ("sequences", "positions", "chains", "counts", "token_ids", "finishes")),
        column("cached_tokens"),
        Logprobs(*(logprobs(name) for name in ("sampled", "ranks", "top_counts", "top_ids", "top_logprobs"))),
        {row: each.errors[0] for row, each in enumerate(batches) if each.errors},
        MODEL,
    )


class Reader:
    """A detokenizer and its one shard."""

    def __init__(self, pool: Pool, orders: dict[bytes, Order], sid: bytes) -> None:
        self._pool, self._orders, self.sid = pool, orders, sid
        self.shard = Shard(SHARD, pool.bus.keys, Detokenizer(pool.tokenizer))
        self._out: list[Call[Any]] = []
        pool.connection.call(Hello(sid, SessionKind.DETOKENIZER, "detokenizer", "", TTL_MS))

    def take(self, dead: bytes | None) -> None:
        """Leases the shard and rebuilds it. What ended on the way is retired later, or never."""
        if dead is not None:
            self._pool.connection.call(Renew(dead, -1))
        assert self._pool.connection.call(LeaseShard(self.sid, SHARD))
        for _, taken in rebuild(self._pool.connection.execute, self.sid, self.shard):
            self._note(taken, whole=True)
        for _, rows in self.shard.detokenizer.snapshots():
            self._deliver(list(rows.rows()))

    def read(self, count: int) -> int:
        """Reads so many entries, and says how many there were."""
        stream = self.shard.log_stream
        found = self._pool.connection.call(Read({stream: self.shard.log_position}, count)).get(stream, [])
        for entry in found:
            self._note(self.shard.take(entry))
        return len(found)

    def flush(self) -> None:
        self._pool.connection.execute(self._out)
        self._out = []

    def compact(self, *, hears: bool = True) -> None:
        """As the service does: what has ended is retired before. Without `hears` the answer is lost."""
        self.flush()
        if (compaction := self.shard.extent.compaction(LIMITS)) is not None:
            calls = self.shard.compact(compaction, self.sid, 1)
            if all(self._pool.connection.execute(calls)) and hears:
                self.shard.extent.compacted(compaction, 0)

    def still_leases(self) -> bool:
        return self._pool.connection.call(LeaseShard(self.sid, SHARD, held=True))

    def release(self) -> None:
        self._pool.connection.call(ReleaseShard(self.sid, SHARD))

    def _note(self, taken: Taken, *, whole: bool = False) -> None:
        assert not taken.poison
        if not whole:
            self._deliver(list(taken.effects.rows()))
        for each in taken.effects.retirements:
            if whole:
                self._deliver(list(each.result.rows().rows()))
            result = wire.encode_finished(each.result)
            self._out.append(Retire(self.sid, SHARD, each.request_id, result, TTL_MS))

    def _deliver(self, rows: list[TextRow]) -> None:
        for row in rows:
            self._orders[row.request_id].client.take(row)


def place(pool: Pool, writer: Writer, number: int, order: Order) -> Order:
    """Submits a request and has it claimed, and computes what must become of it."""
    n = len(order.fates)
    order.request_id = pool.open(number, SHARD, scheduler=writer.sid, n=n, **order.params)
    order.num_committed = [0] * n
    writer.claimed(order)
    order.client = Client(n)
    stored = pool.connection.call(Fetch(order.request_id))
    assert stored is not None
    assert stored.route == GATEWAY
    undisturbed = Detokenizer(pool.tokenizer)
    opening = {k.REQUEST: order.request_id, k.HEADER: stored.header, k.BODY: stored.body, k.META: stored.meta}
    undisturbed.open(wire.decode_opening(opening))
    retirements = []
    for index, fate in enumerate(order.fates):
        for size in (len(fate.token_ids), 1):  # the second row only ends
            history = History()
            if size == 1:
                history = History(list(fate.token_ids), chain.extend(chain.CHAIN_START, fate.token_ids))
            if size > 1 or not fate.with_last:
                retirements += undisturbed.push(_next_row(order, index, history, size)).retirements
    (retirement,) = retirements
    order.expected = retirement.result
    return order


def orders_of(pool: Pool) -> list[Order]:
    """Requests of every kind: with logprobs, samples, stop strings, hidden ends, errors."""
    ids = pool.ids
    error = RequestError(ErrorCode.DEADLINE_EXCEEDED, "late")
    texts = ["the old mill by the brook " * 4, "by the brook " * 4 + "mill the old", "日本 the brook" * 2, "日 the"]
    return [
        Order({"logprobs": 2}, [Fate(ids(texts[0]), FinishReason.LENGTH)]),
        Order(
            {"stop": ["mill", "x"]},
            [Fate([*ids(texts[1]), 0], FinishReason.STOP), Fate([*ids(texts[3]), 0], FinishReason.STOP)],
        ),
        Order(
            {"logprobs": 0},
            [
                Fate(ids(texts[2]), FinishReason.LENGTH, with_last=False),
                Fate(ids(texts[3]), FinishReason.ERROR, with_last=False, error=error),
                Fate(ids(texts[3]), FinishReason.STOP, with_last=False),
            ],
        ),
        Order({"stop": ["brook!"]}, [replace(Fate(ids(texts[0]), FinishReason.CANCELLED), with_last=False)]),
    ]
