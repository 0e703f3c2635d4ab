"""The bus functions' own state as a value: the real pool in memory, set to any state and asked what a call does to it.

A state is a number; the pool's plain data is taken out after each call and put back before the next, and what a call
does to a state is looked up where it was seen before. Time stands still within a run of the server: a lease runs out
when the world says so (`expire`), and what a TTL would delete stays.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from itertools import count
from typing import Any, NamedTuple

from servicekit.bus.calls import Call, Read, RequestState, SessionKind
from servicekit.bus.keys import Keys
from servicekit.bus.memory_pool import MemoryPool
from servicekit.bus.memory_streams import MemoryStream

_PLAIN = (bytes, str, int, float, bool, type(None), tuple, Enum, frozenset)
_NOT_DATA = (
    *("_keys", "_now_ms", "_operations", "_num_owned", "_order", "_expiries"),
    # What surveys tell of: in these spaces nobody asks for changes, but for everything, which comes to the same.
    *("_generation", "_changed", "_gone", "_base"),
)


class Fields(dict[bytes, Any]):
    """A dict that may stand in a call that is looked up."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


class Interned:
    """Values as numbers, and back."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._values: list[Any] = []

    def number(self, value: Hashable) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self._values)
            self._values.append(value)
        return number

    def value(self, number: int) -> Any:
        return self._values[number]

    def __len__(self) -> int:
        return len(self._values)


class RequestView(NamedTuple):
    """What a state of the pool holds of one request."""

    state: RequestState
    owner: bytes | None
    route: bytes
    is_cancelled: bool


@dataclass(frozen=True)
class PoolView:
    """What the world and the actors look at without asking the bus, for instance to leave out steps that do nothing."""

    run: int
    sessions: dict[bytes, tuple[SessionKind, bool, bool]]  # kind, active, its lease runs
    requests: dict[bytes, RequestView]
    results: dict[bytes, bytes]
    lengths: dict[bytes, int]  # entries by stream
    must_settle: bool  # the server was restarted a moment ago
    leases: dict[int, bytes]
    other_keys: frozenset[str]  # of requests: checkpoints, marks


class ExploredPool:
    """All states of one pool. `pool_type` may leave a rule out."""

    def __init__(self, pool_type: type[MemoryPool] = MemoryPool) -> None:
        self.keys = Keys("m")
        self._run = 0
        self._pool = pool_type(self.keys, lambda: 1000 * (self._run + 1), "run0")
        self._parts = _parts(self._pool)
        self._states = Interned()
        self._answers: dict[tuple[int, Call[Any]], tuple[Any, int]] = {}
        self._views: dict[int, PoolView] = {}
        self.first = self._freeze()

    def __len__(self) -> int:
        return len(self._states)

    def call(self, state: int, call: Call[Any]) -> tuple[Any, int]:
        """The answer to a call in a state, and the state behind it."""
        if isinstance(call, Read):
            call = Read(Fields(call.streams), call.count)
        known = self._answers.get((state, call))
        if known is None:
            self._thaw(state)
            answer = self._pool.apply(call)
            known = self._answers[state, call] = answer, self._freeze()
        return known

    def expire(self, state: int, sid: bytes) -> int:
        """A session's lease runs out."""
        self._thaw(state)
        self._pool._sessions._sessions[sid].until_ms = 0
        return self._freeze()

    def settle(self, state: int) -> int:
        """As long as a pool settles at least after a restart is over."""
        self._thaw(state)
        self._pool._sessions._settle_ms = 0
        return self._freeze()

    def restart(self, state: int) -> int:
        """The server comes back as another run, with what it had in a state."""
        self._thaw(state)
        self._run += 1
        self._pool.new_run(f"run{self._run}")
        return self._freeze()

    def view(self, state: int) -> PoolView:
        """What stands in a state."""
        view = self._views.get(state)
        if view is None:
            self._thaw(state)
            view = self._views[state] = self._look()
        return view

    def _look(self) -> PoolView:
        pool, sessions = self._pool, self._pool._sessions
        now_ms = 1000 * (self._run + 1)
        streams = pool._streams._streams
        return PoolView(
            run=self._run,
            sessions={
                sid: (session.kind, sessions.is_active(sid), session.until_ms > now_ms)
                for sid, session in sessions._sessions.items()
            },
            requests={
                request_id: RequestView(request.state, request.owner, request.route, bool(request.cancel_reason))
                for request_id, request in pool._requests.items()
            },
            results=dict(pool._results),
            lengths={name: len(stream) for name, stream in streams.items()},
            must_settle=bool(sessions._settle_ms),
            leases=dict(sessions._leases),
            other_keys=frozenset(f"mark of {request_id!r}" for request_id in pool._marks)
            | {f"checkpoint of {each!r}" for each, request in pool._requests.items() if request.checkpoint is not None}
            | {f"{each!r} waits" for each in pool._waiting._waiters},
        )

    def _freeze(self) -> int:
        return self._states.number((self._run, tuple(_frozen_part(part) for part in self._parts)))

    def _thaw(self, state: int) -> None:
        self._run, parts = self._states.value(state)
        for part, data in zip(self._parts, parts, strict=True):
            for name, value in data:
                setattr(part, name, _thawed(value))
        self._pool._expiries = []


def _parts(pool: MemoryPool) -> list[Any]:
    """The objects that hold the pool's data: itself, and what it is made of."""
    parts: list[Any] = [pool]
    for part in parts:
        for value in vars(part).values():
            if type(value).__module__.startswith("servicekit.bus.memory") and value not in parts:
                parts.append(value)
    return parts


def _frozen_part(part: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, _frozen(value))
        for name, value in sorted(vars(part).items())
        if name not in _NOT_DATA and not _is_part(value) and not isinstance(value, Callable | count)  # type: ignore[arg-type]
    )


def _is_part(value: Any) -> bool:
    return type(value).__module__.startswith("servicekit.bus.memory") and hasattr(value, "__dict__")


def _frozen(value: Any) -> Any:
    """A hashable copy; of containers and objects with their type in front."""
    kind = type(value)
    if isinstance(value, _PLAIN) or callable(value):
        return value
    if kind is dict:
        items = [(key, _frozen(each)) for key, each in value.items() if not _is_untouched(each)]
        return (dict, tuple(sorted(items, key=_key)))
    if kind in (list, set):
        return (kind, tuple(_frozen(each) for each in (value if kind is list else sorted(value))))
    if is_dataclass(value) and value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return value
    return (kind, tuple(_frozen(getattr(value, name)) for name in _names(kind, value)))


def _thawed(value: Any) -> Any:
    if type(value) is not tuple or not value or not isinstance(value[0], type):
        return value
    kind, parts = value
    if kind is dict:
        return {key: _thawed(each) for key, each in parts}
    if kind in (list, set):
        return kind(_thawed(each) for each in parts)
    made = object.__new__(kind)
    for name, each in zip(_names(kind, made), parts, strict=True):
        object.__setattr__(made, name, _thawed(each))
    return made


def _key(item: tuple[Any, Any]) -> Any:
    key = item[0].value if isinstance(item[0], Enum) else item[0]
    return type(key).__name__, key


_names_of: dict[type, tuple[str, ...]] = {MemoryStream: ("_ids", "_fields", "_groups", "_last")}


def _names(kind: type, value: Any) -> tuple[str, ...]:
    names = _names_of.get(kind)
    if names is None:
        names = _names_of[kind] = tuple(field.name for field in fields(value)) if is_dataclass(kind) else ()
        assert names, f"{kind} is no plain data"
    return names


def _is_untouched(value: Any) -> bool:
    """A stream that somebody looked for and nobody wrote to."""
    return isinstance(value, MemoryStream) and value._last == (0, 0) and not value._groups
