"""One pool under test, with the steps of a request's life as short words."""

from dataclasses import dataclass, field
from itertools import count

import hiredis

from servicekit.bus import Bus, Connection
from servicekit.bus.calls import (
    Bounds,
    Claim,
    Entry,
    Hello,
    LeaseShard,
    Read,
    ReadGroup,
    Renew,
    Retire,
    SessionKind,
    StoredRequest,
    Submit,
    SubmitOutcome,
    Tokenized,
)
from servicekit.bus.commands import pack
from servicekit.bus.keys import REQUEST, TOKENIZERS, Keys, Names
from servicekit.bus.redis_address import parse_address

# No byte is special: line ends, RESP's own markers, zero, high bytes, separators of keys.
AWKWARD = bytes(range(256)) + b"\r\n$-1\r\n*0\r\n:{}"
DEAD_MS = -1  # a session that renews with this TTL has expired at once
LONG_MS = 60_000


def sid_of(number: int) -> bytes:
    """A session id whose bytes are awkward."""
    return bytes([number, 0, 13, 10]) * 4


def id_of(number: int) -> bytes:
    """A request id whose bytes are awkward."""
    return bytes([255, number, 0, 10]) * 4


def ask(url: str, *command: str) -> str:
    """A server's reply to a command that is not part of the bus."""
    reader = hiredis.Reader(encoding="utf-8")
    with parse_address(url).open_socket() as sock:
        sock.sendall(pack(command))
        while (reply := reader.gets()) is False:
            if not (received := sock.recv(1 << 16)):
                raise ConnectionResetError("the server closed the connection before it answered")
            reader.feed(received)
    return " ".join(reply) if isinstance(reply, list) else str(reply)


def write_everything(url: str) -> None:
    """The server has given to the operating system what it acknowledged. With `everysec` it puts that off for up to two
    seconds while an fsync hangs, and a kill in that time loses it."""
    assert ask(url, "CONFIG", "SET", "appendfsync", "always") == "OK"


def seem_restarted(url: str, keys: Keys) -> None:
    """The pool's next hello finds the server to be another run than the one it knows."""
    for key in ask(url, "KEYS", keys.key(Names.REQUEST, "*").decode().replace("{", "[{]").replace("}", "[}]")).split():
        ask(url, "HSET", key, "routed", "another")
    ask(url, "SET", keys.run.decode(), "another", "XX")


def seem_settled(url: str, keys: Keys) -> None:
    """So much time has passed as a pool settles at least."""
    ask(url, "SET", keys.key(Names.SETTLE).decode(), "1", "XX")


@dataclass
class Flow:
    """A pool and one connection to it."""

    bus: Bus
    connection: Connection
    _numbers: "count[int]" = field(default_factory=lambda: count(1))

    def session(self, kind: SessionKind = SessionKind.SCHEDULER, ttl_ms: int = LONG_MS) -> bytes:
        """A new session."""
        number = next(self._numbers)
        sid = sid_of(number)
        assert self.connection.call(Hello(sid, kind, f"session-{number}", f"host:{number}", ttl_ms)).active
        return sid

    def expire(self, sid: bytes) -> None:
        """The session's lease runs out; nobody took anything yet."""
        assert self.connection.call(Renew(sid, DEAD_MS))

    def submitted(self, tenant: str = "tenant") -> bytes:
        """A request in state PROMPT."""
        request_id = id_of(next(self._numbers))
        assert self.connection.call(submit(request_id, tenant)) is SubmitOutcome.CREATED
        return request_id

    def ready(self) -> bytes:
        """A request in state READY."""
        request_id = self.submitted()
        (hint,) = self.hints()
        assert hint.fields[REQUEST] == request_id
        tokenized = Tokenized(request_id, hint.entry_id, b"meta" + AWKWARD, 2, token_ids=b"tokens" + AWKWARD)
        assert self.connection.call(tokenized)
        return request_id

    def running(self, sid: bytes, shard: int = 0) -> bytes:
        """A request in state RUNNING, owned by `sid`."""
        request_id = self.ready()
        claimed = self.connection.call(Claim(sid, 1, shard))
        assert claimed is not None
        assert [request.request_id for request in claimed] == [request_id]
        return request_id

    def ended(self, ttl_ms: int = LONG_MS) -> bytes:
        """A request in state ENDED."""
        request_id = self.running(self.session())
        detokenizer = self.session(SessionKind.DETOKENIZER)
        assert self.connection.call(LeaseShard(detokenizer, 0))
        assert self.connection.call(Retire(detokenizer, 0, request_id, b"result", ttl_ms))
        return request_id

    def hints(self, consumer: bytes = b"tokenizer-1") -> list[Entry]:
        """What a tokenizer finds."""
        return self.connection.call(ReadGroup(self.bus.keys.prompts, TOKENIZERS, consumer, 64))

    def entries(self, stream: bytes) -> list[Entry]:
        """All entries of a stream."""
        return self.connection.call(Read({stream: b"0-0"}, count=10_000)).get(stream, [])

    def fields(self, stream: bytes) -> list[dict[bytes, bytes]]:
        """All entries of a stream, without their ids."""
        return [entry.fields for entry in self.entries(stream)]


def submit(
    request_id: bytes,
    tenant: str = "tenant",
    digest: bytes = b"digest",
    *,
    num_tokens: int = 0,
    deadline_ns: int = 0,
    bounds: Bounds = Bounds(),  # noqa: B008  (a value)
) -> Submit:
    """A submit with awkward contents."""
    return Submit(
        *(request_id, tenant, b"header" + AWKWARD, b"body" + AWKWARD, digest, sid_of(200), 1),
        num_tokens=num_tokens,
        deadline_ns=deadline_ns,
        bounds=bounds,
        prompt=b"prompt" + AWKWARD,
    )


def ids(requests: list[StoredRequest]) -> list[bytes]:
    """The ids of requests."""
    return [request.request_id for request in requests]
