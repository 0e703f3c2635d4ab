"""A pool in memory with a scheduler service in a thread; the test plays gateway, tokenizer, worker and detokenizer."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from memory_bus import MemoryBus
from paged_worker import PagedWorker, reference

from contract.domain import chain
from contract.domain.finish import FinishReason, RequestError
from contract.domain.rows import TokenRows
from contract.domain.timeline import Computed
from contract.v1 import common_pb2, requests_pb2, results_pb2
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.service import SchedulerService
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.wire import decode_rows, encode_rows
from servicekit.bus import BusFull, BusUnavailable, Connection, keys
from servicekit.bus.calls import (
    Append,
    Call,
    Cancel,
    Compact,
    Hello,
    LeaseShard,
    Leave,
    ListSessions,
    Read,
    RegisterWorker,
    Revalidate,
    SessionKind,
    Submit,
    Tokenized,
)
from servicekit.lifecycle import Stop
from worker_svc.wire import decode_plan, encode_result

LIMITS = WorkerLimits(num_blocks=32, block_size=4, max_num_seqs=4, max_model_len=64)
PATIENCE_S = 600.0


class LossyBus(MemoryBus):
    """Carries calls out and then, now and then, says that it could not; sometimes it really does not."""

    def __init__(self, seed: int, share: float) -> None:
        super().__init__()
        self.dice = random.Random(seed)
        self.share = share
        self.num_losses = 0

    def lossy(self) -> "LossyBus":
        """This bus for the one who is to suffer; the bus itself is reliable."""
        return _LossyView(self)  # type: ignore[return-value]


class _LossyView:
    def __init__(self, bus: LossyBus) -> None:
        self.bus, self.keys = bus, bus.keys

    def connect(self) -> "_LossyConnection":
        return _LossyConnection(self.bus)


class _LossyConnection:
    def __init__(self, bus: LossyBus) -> None:
        self._bus, self._connection = bus, bus.connect()

    def call(self, call: Call[Any]) -> Any:
        return self.execute([call])[0]

    def execute(self, calls: Sequence[Call[Any]]) -> list[Any]:
        if self._bus.dice.random() < self._bus.share / 2:
            self._bus.num_losses += 1
            raise BusUnavailable("lost before")
        answers = self._connection.execute(calls)
        # Saying hello does not run out of memory: its part of the contract is with BusUnavailable.
        kinds = [BusUnavailable] if isinstance(calls[0], Hello | Revalidate | Leave) else [BusUnavailable, BusFull]
        if self._bus.dice.random() < self._bus.share:
            self._bus.num_losses += 1
            raise self._bus.dice.choice(kinds)("lost behind")
        return answers

    def reconnect(self) -> None:
        self._connection.reconnect()

    def close(self) -> None:
        self._connection.close()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain for: {what}"
        time.sleep(0.002)


def prompt(number: int, length: int = 9) -> list[int]:
    """A prompt that its number tells apart."""
    return [(number + position) % 11 for position in range(length)]


def expected(number: int, prompt: list[int], max_tokens: int = 8, sequence: int = 0) -> list[int]:
    """What a worker generates for the request `number` with this prompt."""
    seed = chain.sequence_seed(number, sequence)
    return reference(prompt, seed, (), 0, min(LIMITS.capacity, len(prompt) + max_tokens))[0]


def session_of(bus: MemoryBus, name: str, *, after: bytes = b"") -> bytes:
    """The living session of the process with this name, once there is one that comes after another."""
    connection = bus.connect()
    found: list[bytes] = []

    def is_there() -> bool:
        sessions = connection.call(ListSessions())
        found.extend(each.sid for each in sessions if each.name == name and each.alive and each.sid != after)
        return bool(found)

    until(is_there, f"a session of {name}")
    return found[0]


@contextmanager
def scheduler(bus: MemoryBus, name: str = "s", **settings: object) -> Iterator[SchedulerService]:
    """A service that runs; at the end it is told to leave at once."""
    chosen = SchedulerSettings(**{"name": name, "num_shards": 2} | settings)  # type: ignore[arg-type]
    service = SchedulerService(chosen, bus)
    stop = Stop()
    failures: list[BaseException] = []

    def body() -> None:
        try:
            service.run(stop)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        stop.end()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert not failures, failures


class Client:
    """Submits requests as gateway and tokenizer do, and reads the log as a detokenizer does."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.connection: Connection = bus.connect()
        self.connection.call(Hello(b"c" * 16, SessionKind.GATEWAY, "client", "", 600_000))
        self.positions = {bus.keys.tokens(shard): b"0-0" for shard in range(2)}
        self.tokens: dict[tuple[bytes, int], list[int]] = {}
        self.chains: dict[tuple[bytes, int], int] = {}
        self.finishes: dict[tuple[bytes, int], FinishReason] = {}
        self.errors: dict[bytes, RequestError] = {}
        self.shards: dict[bytes, set[bytes]] = {}
        self.opened: list[bytes] = []

    def come_back(self) -> None:
        """After an outage, as a gateway that has confirmed its requests."""
        self.connection.reconnect()
        hello = Hello(b"c" * 16, SessionKind.GATEWAY, "client", "", 600_000, create=False)
        assert self.connection.execute([hello, Revalidate(b"c" * 16, 600_000)])[1]

    def submit(
        self,
        number: int,
        prompt: list[int],
        *,
        n: int = 1,
        max_tokens: int = 8,
        deadline_ns: int = 0,
        is_tokenized: bool = True,
        meta: bytes | None = None,
        body: bytes | None = None,
        witness: Sequence[Sequence[int]] = (),
    ) -> bytes:
        request_id = number.to_bytes(16, "big")
        header = common_pb2.Header(
            request_id=request_id, seed=number, arrival_unix_ns=time.time_ns(), deadline_unix_ns=deadline_ns
        )
        generate = requests_pb2.GenerateRequest(n=n, sampling=requests_pb2.SamplingParameters(temperature=0.5))
        tokenized = requests_pb2.TokenizedPrompt(num_tokens=len(prompt), max_tokens=max_tokens)
        body = generate.SerializeToString() if body is None else body
        meta = tokenized.SerializeToString() if meta is None else meta
        now_ns = time.time_ns()
        submit = Submit(
            *(request_id, "", header.SerializeToString(), body, b"d", b"c" * 16, now_ns),
            deadline_ns=deadline_ns,
            witness=tuple(np.array(each, "<u4").tobytes() for each in witness),
        )
        self.connection.call(submit)
        if is_tokenized:
            token_ids = np.array(prompt, "<u4").tobytes()
            self.connection.call(Tokenized(request_id, b"0-1", meta, now_ns, len(prompt), token_ids))
        return request_id

    def cancel(self, request_id: bytes, reason: int = 1, sequence: int = -1) -> None:
        self.connection.call(Cancel(request_id, int(reason), time.time_ns(), sequence=sequence))

    def read(self) -> None:
        for stream, entries in self.connection.call(Read(self.positions, 1000)).items():
            for entry in entries:
                self.positions[stream] = entry.entry_id
                if keys.PAYLOAD in entry.fields:
                    self._take(entry.fields[keys.PAYLOAD], stream)
                else:
                    self.opened.append(entry.fields[keys.REQUEST])

    def _take(self, payload: bytes, stream: bytes) -> None:
        rows = decode_rows(payload)
        starts = np.cumsum(rows.counts) - rows.counts
        for row, request_id in enumerate(rows.request_ids):
            assert request_id in self.opened
            self.shards.setdefault(request_id, set()).add(stream)
            key = request_id, int(rows.sequences[row])
            tokens = self.tokens.setdefault(key, [])
            before = self.chains.get(key, chain.CHAIN_START)
            if (rows.positions[row], rows.chains[row]) != (len(tokens), before) or key in self.finishes:
                continue  # as a detokenizer does
            new = rows.token_ids[starts[row] : starts[row] + rows.counts[row]].tolist()
            tokens += new
            self.chains[key] = chain.extend(before, new)
            if rows.finishes[row]:
                self.finishes[key] = FinishReason(rows.finishes[row])
            if row in rows.errors:
                self.errors[request_id] = rows.errors[row]

    def compact(self) -> None:
        """What was read goes from the logs into checkpoints, as a detokenizer does it; all that there is was read."""
        self.read()
        holder = b"d" * 16
        self.connection.call(Hello(holder, SessionKind.DETOKENIZER, "d", "", 600_000))
        checkpoints = tuple((request_id, self._checkpoint(request_id)) for request_id in self.opened)
        for shard in range(2):
            self.connection.call(LeaseShard(holder, shard))
            assert self.connection.call(Compact(holder, shard, b"9999999999999-0", checkpoints))

    def _checkpoint(self, request_id: bytes) -> bytes:
        known = [key for key in self.tokens if key[0] == request_id]
        rows = TokenRows(
            request_ids=[request_id] * len(known),
            sequences=np.array([sequence for _, sequence in known], np.uint32),
            positions=np.zeros(len(known), np.uint32),
            chains=np.full(len(known), chain.CHAIN_START, np.uint64),
            counts=np.array([len(self.tokens[key]) for key in known], np.uint32),
            token_ids=np.array([token_id for key in known for token_id in self.tokens[key]], np.uint32),
            finishes=np.array([self.finishes.get(key, 0) for key in known], np.uint8),
            cached_tokens=np.zeros(len(known), np.uint32),
        )
        return encode_rows(rows, b"d" * 16, Computed())

    def logged(self) -> list[tuple[tuple[bytes, int], int]]:
        """Sequence and position of all rows that the logs have."""
        found: list[tuple[tuple[bytes, int], int]] = []
        for entries in self.connection.call(Read(dict.fromkeys(self.positions, b"0-0"), 1000)).values():
            for entry in entries:
                if keys.PAYLOAD in entry.fields:
                    rows = decode_rows(entry.fields[keys.PAYLOAD])
                    places = zip(rows.sequences.tolist(), rows.positions.tolist(), strict=True)
                    found += [((rows.request_ids[i], place[0]), place[1]) for i, place in enumerate(places)]
        return found

    def wait(self, *sequences: tuple[bytes, int]) -> None:
        """Until these have ended."""

        def have_ended() -> bool:
            self.read()
            return all(sequence in self.finishes for sequence in sequences)

        until(have_ended, f"the end of {len(sequences)} sequences")

    def dead_letters(self) -> list[dict[bytes, bytes]]:
        found = self.connection.call(Read({self.bus.keys.dead: b"0-0"}, 1000))
        return [entry.fields for entries in found.values() for entry in entries]


class Worker:
    """A worker in a thread, over the pretended paged cache."""

    def __init__(
        self, bus: MemoryBus, name: str = "w", home_shard: int | None = 1, limits: WorkerLimits = LIMITS
    ) -> None:
        self.bus, self.name, self.limits, self.home_shard = bus, name, limits, home_shard
        self.num_incarnations = 0
        self.num_steps = 0
        self.spoil: bytes | None = None  # published in place of the next result
        self.incarnation = b""
        self.is_held = threading.Event()  # set: plans are read but not carried out
        self.hold_after: int | None = None  # steps after which it is held by itself
        self._stopped = threading.Event()
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._body, daemon=True)

    def __enter__(self) -> "Worker":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(PATIENCE_S)
        assert not self._failures, self._failures

    def _body(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001
            self._failures.append(error)

    def _run(self) -> None:
        connection = self.bus.connect()
        position = self._register(connection)
        paged, session, step = PagedWorker(self.limits), b"", 0
        while not self._stopped.is_set():
            try:
                found = connection.call(Read({self.bus.keys.steps(self.name): position}, 1, 20))
            except BusUnavailable:
                position = self._reconnect(connection)
                continue
            for entry in found.get(self.bus.keys.steps(self.name), []):
                position = entry.entry_id
                received = decode_plan(entry.fields[keys.PAYLOAD])
                if received.incarnation != self.incarnation:
                    continue
                if received.plan.step == 1:
                    paged, session, step = PagedWorker(self.limits), received.session, 0
                if received.session == session and received.plan.step <= step:
                    continue
                if received.session != session or received.plan.step != step + 1:
                    position = self._begin_anew(connection)
                    break
                while self.is_held.is_set() and not self._stopped.is_set():
                    time.sleep(0.002)
                step = received.plan.step
                result = paged.execute(received.plan)
                self.num_steps += 1
                if self.num_steps == self.hold_after:
                    self.is_held.set()
                payload = encode_result(result, session, self.incarnation, time.time_ns())
                if self.spoil is not None:
                    payload, self.spoil = self.spoil, None
                fields = {keys.PAYLOAD: payload}
                try:
                    connection.call(Append(self.bus.keys.results(self.name), fields, keys.RESULTS_CAP))
                except BusUnavailable:  # its next life computes it again
                    position = self._reconnect(connection)
                    break
        connection.call(Leave(self.incarnation))

    def _begin_anew(self, connection: Connection) -> bytes:
        try:
            return self._register(connection)
        except BusUnavailable:
            return self._reconnect(connection)

    def _reconnect(self, connection: Connection) -> bytes:
        while True:
            try:
                connection.reconnect()
                return self._register(connection)
            except BusUnavailable:
                time.sleep(0.002)

    def _register(self, connection: Connection) -> bytes:
        self.num_incarnations += 1
        self.incarnation = self.num_incarnations.to_bytes(8, "big") + self.name.encode().ljust(8, b".")
        info = results_pb2.WorkerInfo(
            model="m",
            num_blocks=self.limits.num_blocks,
            block_size=self.limits.block_size,
            max_num_seqs=self.limits.max_num_seqs,
            max_model_len=self.limits.max_model_len,
            home_shard=self.home_shard,
            has_state=self.limits.has_state,
            num_saved_states=self.limits.num_saved_states,
        )
        connection.call(Hello(self.incarnation, SessionKind.WORKER, self.name, "", 600_000))
        return connection.call(RegisterWorker(self.incarnation, self.name, info.SerializeToString()))
