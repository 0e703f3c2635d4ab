"""What stands behind a gateway in these tests: it takes requests from the bus and says what a script wants."""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
from memory_bus import MemoryBus

from contract.domain import chain
from contract.domain.chat_facts import UNKNOWN_CHAT, ChatFacts
from contract.domain.generation_defaults import OPENAI_DEFAULTS, GenerationDefaults
from contract.domain.rows import TokenLogprob
from contract.v1 import common_pb2, requests_pb2, results_pb2, status_pb2, text_pb2
from contract.wire.chat_facts import encode_chat_facts
from contract.wire.generation_defaults import encode_defaults
from servicekit.bus import BusUnavailable
from servicekit.bus import keys as k
from servicekit.bus.calls import (
    Append,
    Call,
    Claim,
    Fetch,
    Hello,
    LeaseShard,
    Leave,
    Read,
    ReadGroup,
    RegisterWorker,
    Renew,
    Retire,
    Revalidate,
    SessionKind,
    StoredRequest,
    Tokenized,
)

SHARD = 0
TTL_MS = 600_000
NUM_PROMPT_TOKENS = 7
MODEL_DIGEST = b"model---"
META = requests_pb2.TokenizedPrompt(num_tokens=NUM_PROMPT_TOKENS).SerializeToString()
STOP, LENGTH, CANCELLED, ERROR = 1, 2, 3, 4


@dataclass
class Spoken:
    """One sample's history."""

    token_ids: list[int] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)  # of the text
    num_chars: int = 0
    chain: int = chain.CHAIN_START
    offsets: dict[int, int] = field(default_factory=lambda: {0: 0})  # characters behind so many tokens
    end: text_pb2.SequenceEnd | None = None

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass
class Row:
    """One row to be sent."""

    request_id: bytes
    sequence: int
    token_offset: int
    text_offset: int
    chain: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob]
    end: text_pb2.SequenceEnd | None


class Incoming:
    """A request that arrived, and what was said for it."""

    def __init__(self, pipeline: "ScriptedPipeline", stored: StoredRequest) -> None:
        self.pipeline = pipeline
        self.request_id = stored.request_id
        self.route = stored.route
        self.header = common_pb2.Header.FromString(stored.header)
        whole = pipeline.call(Fetch(stored.request_id))
        assert whole is not None
        self.body = requests_pb2.GenerateRequest.FromString(whole.body + whole.prompt)
        self.n = self.body.n
        self.spoken = [Spoken() for _ in range(self.n)]
        self.afterwards: list[Callable[[], object]] = []  # one for each time that a client comes back

    def follow(self, hint: dict[bytes, bytes]) -> None:
        """A client came back: from now on its text goes there, beginning behind what it has."""
        self.route = hint[k.ROUTE]
        wanted = text_pb2.AttachOffsets.FromString(hint[k.OFFSETS])
        rows = [self._behind(index, num) for index, num in enumerate(np.frombuffer(wanted.token_offsets, "<u4"))]
        if found := [row for row in rows if row is not None]:
            self.send(*found)
        if self.afterwards:
            self.afterwards.pop(0)()

    def _behind(self, sequence: int, num_tokens: int) -> Row | None:
        spoken = self.spoken[sequence]
        if num_tokens > len(spoken.token_ids) or (num_tokens == len(spoken.token_ids) and spoken.end is None):
            return None
        text_offset = spoken.offsets[num_tokens]
        ids = spoken.token_ids[num_tokens:]
        known = chain.extend(chain.CHAIN_START, spoken.token_ids[:num_tokens])
        text = spoken.text[text_offset:]
        return Row(self.request_id, sequence, int(num_tokens), text_offset, known, ids, text, [], spoken.end)

    def row(
        self,
        text: str = "",
        token_ids: list[int] | None = None,
        *,
        sequence: int = 0,
        finish: int = 0,
        stop: int | str | None = None,
        error: common_pb2.Error | None = None,
        logprobs: list[TokenLogprob] | None = None,
    ) -> Row:
        """What comes next for a sample; usage is told with the last one's end."""
        spoken = self.spoken[sequence]
        ids = [len(spoken.token_ids) + 100] if token_ids is None else token_ids
        end = None
        if finish:
            end = text_pb2.SequenceEnd(reason=common_pb2.FinishReason.ValueType(finish))
            if isinstance(stop, str):
                end.stop_string = stop
            elif stop is not None:
                end.stop_token_id = stop
            if error is not None:
                end.error.CopyFrom(error)
        row = Row(
            self.request_id,
            sequence,
            len(spoken.token_ids),
            spoken.num_chars,
            spoken.chain,
            ids,
            text,
            logprobs or [],
            end,
        )
        spoken.token_ids += ids
        spoken.parts.append(text)
        spoken.num_chars += len(text)
        spoken.offsets[len(spoken.token_ids)] = spoken.num_chars
        spoken.chain = chain.extend(spoken.chain, ids)
        spoken.end = end
        if end is not None and all(each.end for each in self.spoken):
            end.usage.CopyFrom(self.usage())
        return row

    def usage(self) -> common_pb2.Usage:
        return common_pb2.Usage(
            prompt_tokens=NUM_PROMPT_TOKENS,
            output_tokens=sum(len(each.token_ids) for each in self.spoken),
            cached_tokens=3,
        )

    def send(self, *rows: Row) -> None:
        """Rows in one batch."""
        self.pipeline.call(self._text(rows))

    def _text(self, rows: tuple[Row, ...]) -> Append:
        stream = self.pipeline.bus.keys.text(self.route)
        return Append(stream, {k.PAYLOAD: batch(rows).SerializeToString()}, k.TEXT_CAP)

    def say(self, *texts: str, finish: int = STOP, sequence: int = 0) -> None:
        """One batch for each text; the last one ends the sample."""
        for index, text in enumerate(texts):
            last = index == len(texts) - 1
            self.send(self.row(text, sequence=sequence, finish=finish if last else 0))

    def result(self) -> text_pb2.FinishedRequest:
        return text_pb2.FinishedRequest(
            header=self.header,
            sequences=[
                text_pb2.FinishedSequence(
                    text=each.text, token_ids=np.array(each.token_ids, "<u4").tobytes(), end=each.end
                )
                for each in self.spoken
            ],
            usage=self.usage(),
            model_digest=MODEL_DIGEST,
        )

    def retire(self, *rows: Row, tokens: int | None = None) -> bool:
        """Sends the rows, its last text, and ends the request on the bus, at once as a detokenizer does; `tokens`: so
        many were used.
        """
        retire = Retire(
            self.pipeline.sid,
            SHARD,
            self.request_id,
            self.result().SerializeToString(),
            TTL_MS,
            self.route if rows else b"",
            tokens=() if tokens is None else (tokens,),
        )
        calls: list[Call[Any]] = [self._text(rows), retire] if rows else [retire]
        return bool(self.pipeline.execute(calls)[-1])


def batch(rows: tuple[Row, ...]) -> text_pb2.TextBatch:
    token_ids = [token_id for row in rows for token_id in row.token_ids]
    message = text_pb2.TextBatch(
        origin=common_pb2.Origin(sent_unix_ns=time.time_ns()),
        request_ids=b"".join(row.request_id for row in rows),
        sequences=np.array([row.sequence for row in rows], "<u4").tobytes(),
        token_offsets=np.array([row.token_offset for row in rows], "<u4").tobytes(),
        text_offsets=np.array([row.text_offset for row in rows], "<u4").tobytes(),
        chains=np.array([row.chain for row in rows], "<u8").tobytes(),
        counts=np.array([len(row.token_ids) for row in rows], "<u4").tobytes(),
        token_ids=np.array(token_ids, "<u4").tobytes(),
        texts=[row.text for row in rows],
        end_rows=np.array([i for i, row in enumerate(rows) if row.end], "<u4").tobytes(),
        ends=[row.end for row in rows if row.end],
        first_rows=np.array([i for i, row in enumerate(rows) if not row.token_offset], "<u4").tobytes(),
        prompt_tokens=np.array([NUM_PROMPT_TOKENS for row in rows if not row.token_offset], "<u4").tobytes(),
        model_digest=MODEL_DIGEST,
    )
    if any(row.logprobs for row in rows):
        message.logprobs.CopyFrom(_columns(rows))
    return message


def _columns(rows: tuple[Row, ...]) -> common_pb2.LogprobColumns:
    entries: list[TokenLogprob] = []
    for row in rows:
        entries += row.logprobs or [TokenLogprob(token_id, float("nan")) for token_id in row.token_ids]
    pieces = [entry.token_bytes for entry in entries] + [piece for entry in entries for piece in entry.top_bytes]
    return common_pb2.LogprobColumns(
        sampled=np.array([entry.logprob for entry in entries], "<f4").tobytes(),
        ranks=np.array([entry.rank for entry in entries], "<u4").tobytes(),
        top_counts=np.array([len(entry.top) for entry in entries], "<u4").tobytes(),
        top_ids=np.array([token_id for entry in entries for token_id, _ in entry.top], "<u4").tobytes(),
        top_logprobs=np.array([logprob for entry in entries for _, logprob in entry.top], "<f4").tobytes(),
        byte_counts=np.array([len(piece) for piece in pieces], "<u4").tobytes(),
        token_bytes=b"".join(pieces),
        text_offsets=np.array([entry.text_offset for entry in entries], "<u4").tobytes(),
    )


R = TypeVar("R")
Script = Callable[[Incoming], None]


class ScriptedPipeline:
    """Tokenizer, scheduler, worker and detokenizer in one: every request is given to `script`."""

    def __init__(
        self,
        bus: MemoryBus,
        model: str = "tiny",
        max_model_len: int = 512,
        defaults: GenerationDefaults = OPENAI_DEFAULTS,
        chat: ChatFacts = UNKNOWN_CHAT,
    ) -> None:
        self.bus = bus
        self.sid = os.urandom(16)
        self.tokenizer = b""  # the session of a tokenizer that does nothing
        self.incoming: list[Incoming] = []
        self.script: Script = lambda request: request.say("Hello", " world", finish=STOP)
        self.follows = False  # whether it sees to re-attachments by itself
        self._attach_position = b"0-0"
        self._connection = bus.connect()
        self._lock = threading.Lock()
        self._arrived = threading.Condition()
        self._ending = threading.Event()
        self.call(Hello(self.sid, SessionKind.SCHEDULER, "script", "", TTL_MS))
        self._chat = chat
        self.tell_defaults(defaults)
        info = results_pb2.WorkerInfo(model=model, max_model_len=max_model_len)
        self.call(RegisterWorker(self.sid, "w0", info.SerializeToString()))
        assert self.call(LeaseShard(self.sid, SHARD))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def tell_defaults(self, defaults: GenerationDefaults) -> None:
        """A tokenizer that comes and says what holds where a request does not; the one before leaves."""
        if self.tokenizer:
            self.call(Leave(self.tokenizer))
        sid = self.tokenizer = os.urandom(16)
        facts = {"generation_defaults": encode_defaults(defaults), "chat": encode_chat_facts(self._chat)}
        status = status_pb2.ServiceStatus(**facts).SerializeToString()
        self.call(Hello(sid, SessionKind.TOKENIZER, "script-tokenizer", "", TTL_MS))
        self.call(Renew(sid, TTL_MS, status))

    def close(self) -> None:
        self._ending.set()
        self._thread.join()

    def call(self, call: Call[R]) -> R:
        return cast(R, self.execute((call,))[0])

    def execute(self, calls: Sequence[Call[Any]]) -> list[Any]:
        with self._lock:
            while True:
                try:
                    return self._connection.execute(calls)
                except BusUnavailable:
                    time.sleep(0.01)
                    with contextlib.suppress(BusUnavailable):
                        self._connection.reconnect()

    def append(self, stream: bytes, payload: bytes) -> None:
        self.call(Append(stream, {k.PAYLOAD: payload}, k.TEXT_CAP))

    def wait_for(self, count: int = 1, timeout_s: float = 180) -> list[Incoming]:
        """The requests that came, at least so many."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.incoming) >= count, timeout_s), "no request came"
            return list(self.incoming)

    def hints(self, stream: bytes, count: int = 1, timeout_s: float = 180) -> list[dict[bytes, bytes]]:
        """The entries of a stream, once there are so many."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            entries = self.call(Read({stream: b"0-0"}, 4096)).get(stream, [])
            if len(entries) >= count:
                return [entry.fields for entry in entries]
            assert time.monotonic() < deadline_s, f"{len(entries)} entries in {stream!r}"
            time.sleep(0.005)

    def cancels(self, count: int = 1) -> list[tuple[bytes, int]]:
        """(request id, reason) of the cancels that came."""
        found = self.hints(self.bus.keys.cancels, count)
        return [(fields[k.REQUEST], int(fields[k.REASON])) for fields in found]

    def attaches(self, count: int = 1) -> list[text_pb2.AttachOffsets]:
        """The re-attachments that came."""
        found = self.hints(self.bus.keys.attach(SHARD), count)
        return [text_pb2.AttachOffsets.FromString(fields[k.OFFSETS]) for fields in found]

    def _run(self) -> None:
        while not self._ending.is_set():
            for entry in self.call(ReadGroup(self.bus.keys.prompts, k.TOKENIZERS, b"script", 64)):
                request_id = entry.fields[k.REQUEST]
                if self.call(Fetch(request_id)) is not None:
                    self.call(Tokenized(request_id, entry.entry_id, META, time.time_ns()))
            claimed = self.call(Claim(self.sid, 64, SHARD))
            if claimed is None:  # the bus was restarted
                for sid in (self.sid, self.tokenizer):
                    self.call(Revalidate(sid, TTL_MS))
                self.call(LeaseShard(self.sid, SHARD))
            for stored in claimed if isinstance(claimed, list) else ():
                request = Incoming(self, stored)
                with self._arrived:
                    self.incoming.append(request)
                    self._arrived.notify_all()
                self.script(request)
            if self.follows:
                self._follow()
            time.sleep(0.002)

    def _follow(self) -> None:
        stream = self.bus.keys.attach(SHARD)
        for entry in self.call(Read({stream: self._attach_position}, 64)).get(stream, []):
            self._attach_position = entry.entry_id
            for request in self.incoming:
                if request.request_id == entry.fields[k.REQUEST]:
                    request.follow(entry.fields)


def with_logprobs(request: Incoming) -> None:
    snow = "雪".encode()
    first = TokenLogprob(5, -0.5, ((5, -0.5), (6, -math.inf)), b"He", (b"He", b"Ho"))
    half = TokenLogprob(7, -1.5, ((8, -0.25),), snow[:2], (b"x",), text_offset=2)
    rest = TokenLogprob(9, -2.0, ((9, -2.0),), snow[2:], (snow[2:],), text_offset=2)
    request.send(
        request.row("He", [5], logprobs=[first]),
    )
    request.send(request.row("雪", [7, 9], logprobs=[half, rest]))
    request.send(request.row("", [2], logprobs=[TokenLogprob(2, -0.125, (), b"<eos>", text_offset=3)], finish=STOP))
