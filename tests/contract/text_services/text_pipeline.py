"""A pool in memory with a tokenizer and a detokenizer that run, and a test that plays gateway and scheduler."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from memory_bus import MemoryBus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from contract.domain import chain
from contract.domain.finish import FinishReason
from contract.domain.params import SamplingParams
from contract.domain.request import Header, Prompt, Request
from contract.domain.rows import TextRow
from contract.v1 import common_pb2, requests_pb2, tokens_pb2
from detokenizer_svc.service import DetokenizerService
from detokenizer_svc.settings import DetokenizerSettings
from gateway_svc import wire as gateway_wire
from gateway_svc.core.streams import ClientStream, Refusal
from servicekit.bus import Bus
from servicekit.bus import keys as k
from servicekit.bus.calls import (
    Attach,
    Claim,
    Commit,
    Entry,
    Fetch,
    Hello,
    ListSessions,
    Read,
    RequestState,
    SessionKind,
    StoredRequest,
    Submit,
    SubmitOutcome,
    Tokenized,
)
from servicekit.lifecycle import Service, Stop
from tokenizer_svc.loading import load_vocabulary
from tokenizer_svc.service import TokenizerService
from tokenizer_svc.settings import TokenizerSettings

T = TypeVar("T")
GATEWAY, SCHEDULER = b"G" * 16, b"S" * 16
TTL_MS = 600_000
PATIENCE_S = 180.0
ANSWER = "the old mill by the brook 日本"


def write_model(path: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the old mill by the brook"] * 4, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 200_000, "eos_token_id": 0}))
    return path


def eventually(probe: Callable[[], T]) -> T:
    """The first truthy value of `probe`; other threads are at work on it."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (value := probe()):
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.005)
    return value


@contextmanager
def running(service: Service) -> Iterator[Stop]:
    """The service in a thread, ready; drained at the end, and without an error."""
    stop = Stop()
    errors: list[BaseException] = []

    def body() -> None:
        try:
            service.run(stop)
        except BaseException as error:  # noqa: BLE001  told below
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        eventually(lambda: service.is_ready() or not thread.is_alive())
        yield stop
    finally:
        stop.end()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert not errors, errors


class Pool:
    """Gateway and scheduler of a pool, as far as text is concerned."""

    def __init__(self, model: Path, bus: Bus | None = None) -> None:
        self.model = str(model)
        self.bus: Bus = bus or MemoryBus()
        self.connection = self.bus.connect()
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._position = b"0-0"
        for sid, kind in ((GATEWAY, SessionKind.GATEWAY), (SCHEDULER, SessionKind.SCHEDULER)):
            self.connection.call(Hello(sid, kind, kind.value, "", TTL_MS))

    def tokenizer_service(self, **settings: Any) -> TokenizerService:
        vocabulary = load_vocabulary(self.model)
        return TokenizerService(TokenizerSettings(model=self.model, **settings), self.bus, vocabulary)

    def detokenizer_service(self, **settings: Any) -> DetokenizerService:
        return DetokenizerService(DetokenizerSettings(model=self.model, **settings), self.bus, self.tokenizer)

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def submit(self, number: int, prompt: Prompt, *, deadline_ns: int = 0, **params: Any) -> bytes:
        request_id = bytes([number]) * 16
        header = Header(request_id, "tenant", 0, time.time_ns(), deadline_ns, "", 7)
        request = Request(header, "model", prompt, SamplingParams(**params))
        body, part = gateway_wire.encode_request(request), gateway_wire.encode_prompt(prompt)
        return self.submit_raw(request_id, gateway_wire.encode_header(header), body, part)

    def submit_raw(self, request_id: bytes, header: bytes, body: bytes, prompt: bytes = b"") -> bytes:
        submit = Submit(request_id, "tenant", header, body, b"digest", GATEWAY, time.time_ns(), prompt=prompt)
        outcome = self.connection.call(submit)
        assert outcome is SubmitOutcome.CREATED
        return request_id

    def fetch(self, request_id: bytes) -> StoredRequest:
        stored = self.connection.call(Fetch(request_id))
        assert stored is not None
        return stored

    def open(
        self, number: int, shard: int = 0, num_prompt_tokens: int = 3, scheduler: bytes = SCHEDULER, **params: Any
    ) -> bytes:
        """A request that a scheduler has claimed, as if a tokenizer had done its part."""
        request_id = self.submit(number, Prompt(token_ids=(1,) * num_prompt_tokens), **params)
        meta = requests_pb2.TokenizedPrompt(
            num_tokens=num_prompt_tokens, eos_token_ids=np.zeros(1, "<u4").tobytes()
        ).SerializeToString()
        token_ids = np.ones(num_prompt_tokens, "<u4").tobytes()
        self.connection.call(Tokenized(request_id, b"", meta, 0, num_prompt_tokens, token_ids))
        claimed = self.connection.call(Claim(scheduler, 1, shard))
        assert isinstance(claimed, list)
        assert [each.request_id for each in claimed] == [request_id]
        return request_id

    def commit(self, payload: bytes, shard: int = 0) -> None:
        assert self.connection.call(Commit(SCHEDULER, ((shard, payload),)))

    def rows(
        self,
        request_id: bytes,
        token_ids: list[int],
        *,
        before: list[int] | None = None,
        sequence: int = 0,
        end: int = 0,
        logprob: float | None = None,
    ) -> bytes:
        """A TokenBatch of one row, after the tokens `before`."""
        known = before or []
        columns = tokens_pb2.TokenColumns(
            sequences=np.array([sequence], "<u4").tobytes(),
            positions=np.array([len(known)], "<u4").tobytes(),
            chains=np.array([chain.extend(chain.CHAIN_START, known)], "<u8").tobytes(),
            counts=np.array([len(token_ids)], "<u4").tobytes(),
            token_ids=np.array(token_ids, "<u4").tobytes(),
            finishes=bytes([end]),
        )
        if logprob is not None:
            columns.logprobs.sampled = np.full(len(token_ids), logprob, "<f4").tobytes()
            columns.logprobs.ranks = np.ones(len(token_ids), "<u4").tobytes()
            columns.logprobs.top_counts = np.zeros(len(token_ids), "<u4").tobytes()
        return tokens_pb2.TokenBatch(
            origin=common_pb2.Origin(session=SCHEDULER, sent_unix_ns=time.time_ns()),
            request_ids=request_id,
            columns=columns.SerializeToString(),
        ).SerializeToString()

    def generate(self, request_id: bytes, text: str, end: int = FinishReason.LENGTH, shard: int = 0) -> list[int]:
        """Commits a whole answer, token by token."""
        ids = self.ids(text)
        for i, token_id in enumerate(ids):
            last = end if i == len(ids) - 1 else 0
            self.commit(self.rows(request_id, [token_id], before=ids[:i], end=last), shard)
        return ids

    def read_text(self, gateway: bytes = GATEWAY) -> list[TextRow]:
        """What came for a gateway since the last call."""
        stream = self.bus.keys.text(gateway)
        entries = self.connection.call(Read({stream: self._position}, 1000)).get(stream, [])
        rows: list[TextRow] = []
        for entry in entries:
            self._position = entry.entry_id
            rows += gateway_wire.decode_text(entry.fields[k.PAYLOAD])[1]
        return rows

    def read_until_end(self, request_id: bytes, rows: list[TextRow] | None = None) -> list[TextRow]:
        """Rows of one request up to its end."""
        got = rows if rows is not None else []

        def ended() -> bool:
            got.extend(row for row in self.read_text() if row.request_id == request_id)
            return any(row.usage is not None for row in got)

        eventually(ended)
        return got

    def ended(self, request_id: bytes) -> bool:
        return self.fetch(request_id).state is RequestState.ENDED

    def result(self, request_id: bytes) -> list[TextRow]:
        """The stored result of a request that has ended."""
        eventually(lambda: self.ended(request_id))
        attachment = self.connection.call(Attach(request_id, "tenant", GATEWAY, b""))
        assert attachment.result is not None
        return gateway_wire.decode_finished(request_id, attachment.result)

    def restart(self) -> None:
        """As if the server had died and come back with everything it had."""
        assert isinstance(self.bus, MemoryBus)
        self.bus.stop()
        self.bus.start()
        self.connection.reconnect()

    def sessions(self, kind: SessionKind) -> list[bytes]:
        return [each.sid for each in self.connection.call(ListSessions()) if each.kind is kind and each.alive]

    def entries(self, stream: bytes) -> list[Entry]:
        return self.connection.call(Read({stream: b"0-0"}, 1000)).get(stream, [])


class Client:
    """A gateway's client: takes what extends what it has."""

    def __init__(self, pool: Pool, request_id: bytes, n: int = 1) -> None:
        self._pool, self._request_id = pool, request_id
        self.stream = ClientStream(n)
        self.text = ""

    def take(self, rows: list[TextRow]) -> None:
        for row in rows:
            if row.request_id == self._request_id and not isinstance(new := self.stream.accept(row), Refusal):
                self.text += new.text if row.sequence == 0 else ""

    def has_ended(self) -> bool:
        self.take(self._pool.read_text())
        return self.stream.ended


def text_of(rows: list[TextRow], sequence: int = 0) -> str:
    """The text that rows add up to, each extending what came before."""
    text, num_tokens = "", 0
    for row in rows:
        if row.sequence == sequence:
            assert (row.text_offset, row.token_offset) == (len(text), num_tokens)
            text, num_tokens = text + row.text, num_tokens + len(row.token_ids)
    return text
