"""The bus functions' own state as a value: the shipped functions on a server in memory, set to any state and asked what
a call does to it.

A state is a number; it shares with others the values of keys that they have in common, and what a call does to a state
is looked up where it was seen before. Time stands still within a run of the server: a lease runs out when the world
says so (`expire`), and what a TTL would delete stays.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from memory_pool import MemoryPool
from memory_server import MemoryServer
from memory_store import Hash, Set, SortedSet, Store, V, Value
from memory_streams import Stream
from pool_view import PoolView, look

from servicekit.bus.calls import Call, Read
from servicekit.bus.keys import Keys, Names
from servicekit.bus.library import Library, read_library

# What surveys tell of: in these spaces nobody asks for changes, but for everything, which comes to the same.
_LEFT_OUT = (Names.SURVEY, Names.CHANGED, Names.GONE, Names.LEASES)
_BEGAN_MS = 1_700_000_000_000  # any time will do that Redis takes for one


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


class SharedStore(Store):
    """Its values belong to many states: a value is copied before it changes, and nothing expires."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        super().__init__(now_ms)
        self.changed: set[bytes] = set()

    def thaw(self, values: dict[bytes, Value]) -> None:
        """Holds the values of a state, none of which may change."""
        self.values, self.changed = values, set()

    def made(self, key: bytes, kind: type[V]) -> V:
        value = self.find(key, kind)
        if value is None or key not in self.changed:
            value = self.values[key] = kind() if value is None else kind(value)
            self.changed.add(key)
        return value

    def put(self, key: bytes, value: bytes) -> None:
        self.changed.add(key)
        super().put(key, value)

    def delete(self, key: bytes) -> bool:
        self.changed.add(key)
        return super().delete(key)

    def expire(self, key: bytes, ms: int) -> bool:
        return self.exists(key)


class _State(NamedTuple):
    run: int
    numbers: dict[bytes, int]  # of values, by key


class ExploredPool:
    """All states of one pool, with the functions of a library: those that are shipped, or without a rule."""

    def __init__(self, library: Library | None = None) -> None:
        self.keys = Keys("m")
        self._run = 0
        self._store = SharedStore(lambda: self._now_ms)
        self._server = MemoryServer(self._store)
        self._pool = MemoryPool(self.keys, self._server, library or read_library())
        self._left_out = frozenset(map(self.keys.key, _LEFT_OUT))
        self._values = Interned()  # frozen
        self._shared: list[Value] = []  # the same, as they are on the server
        self._numbers: dict[bytes, int] = {}  # of the state that was thawed last
        self._states = Interned()
        self._thawed: list[_State] = []
        self._answers: dict[tuple[int, Call[Any]], tuple[Any, int]] = {}
        self._views: dict[int, PoolView] = {}
        self.first = self._freeze()

    def __len__(self) -> int:
        return len(self._states)

    def call(self, state: int, call: Call[Any]) -> tuple[Any, int]:
        """The answer to a call in a state, and the state after it."""
        if isinstance(call, Read):
            call = Read(Fields(call.streams), call.count)
        known = self._answers.get((state, call))
        if known is None:
            self._thaw(state)
            (answer,) = self._pool.execute((call,))
            known = self._answers[state, call] = answer, self._freeze()
        return known

    def expire(self, state: int, sid: bytes) -> int:
        """A session's lease runs out."""
        self._thaw(state)
        self._store.made(self.keys.session(sid), Hash)[b"until"] = b"0"
        return self._freeze()

    def settle(self, state: int) -> int:
        """As long as a pool settles at least after a restart is over."""
        self._thaw(state)
        self._store.put(self.keys.key(Names.SETTLE), b"0")
        return self._freeze()

    def restart(self, state: int) -> int:
        """The server comes back as another run, with what it had in a state."""
        self._thaw(state)
        self._run += 1
        return self._freeze()

    def view(self, state: int) -> PoolView:
        """What stands in a state."""
        view = self._views.get(state)
        if view is None:
            self._thaw(state)
            view = self._views[state] = look(self._store, self.keys, self._run)
        return view

    @property
    def _now_ms(self) -> int:
        return _BEGAN_MS + 1000 * self._run

    def _freeze(self) -> int:
        store = self._store
        if store.changed:
            self._numbers = dict(self._numbers)
        for key in store.changed - self._left_out:
            if key in store.values:
                self._numbers[key] = self._number(store.values[key])
            else:
                self._numbers.pop(key, None)
        state = self._states.number((self._run, frozenset(self._numbers.items())))
        if state == len(self._thawed):
            self._thawed.append(_State(self._run, self._numbers))
        return state

    def _number(self, value: Value) -> int:
        number = self._values.number(_frozen(value))
        if number == len(self._shared):
            self._shared.append(value)
        return number

    def _thaw(self, state: int) -> None:
        self._run, self._numbers = self._thawed[state]
        self._server.run_id = f"run{self._run}"
        self._store.thaw({key: self._shared[number] for key, number in self._numbers.items()})


def _frozen(value: Value) -> Hashable:
    """A hashable copy, with its type in front."""
    match value:
        case bytes():
            return value
        case Stream():
            groups = tuple(
                (name, each.last_delivered, tuple(each.pending.items())) for name, each in value.groups.items()
            )
            return Stream, value.last, tuple(value.entries.items()), groups
        case Set():
            return Set, frozenset(value)
        case Hash() | SortedSet():
            return type(value), frozenset(value.items())
