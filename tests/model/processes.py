"""What all processes have in common: a session that says hello, comes back, or is drawn anew."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from clients import Client
from explored_pool import ExploredPool

from servicekit.bus.calls import Call, Hello, Renew, Revalidate, SessionKind

TTL_MS = 100_000_000


class Stage(Enum):
    """How far a connection is."""

    HELLO = "hello"
    CONFIRM = "confirm"  # a gateway: tells a restarted server what it serves
    REVALIDATE = "revalidate"
    UP = "up"


class Hold(NamedTuple):
    """A process's hold on the pool. `number` counts the session ids that were drawn, deaths included."""

    number: int = 0
    is_known: bool = False  # the pool has greeted this session
    run: int = -1  # of the server, that the connection belongs to
    stage: Stage = Stage.HELLO
    new_run: bool = False
    is_lost: bool = False


class Move(NamedTuple):
    """One step of a process: what is called, and what it leads to. None: unchanged."""

    name: str
    me: Any
    pool: int
    clients: tuple[Client, ...] | None = None
    if_lost: Any = None  # the process, where the answer does not come
    if_full: Any = None  # the process, where the server is out of memory and it does not just try again
    is_lazy: bool = False  # a timer that runs out when nothing else is left to do
    is_reading: bool = False  # the next entry of a stream is read: nobody else can tell, or change what it is
    wrong: str = ""


M = TypeVar("M", bound=tuple[Any, ...])


class Process(ABC):
    """A process of one kind. Its state is a tuple with a `hold`; all of its steps follow from that and the pool."""

    kind: SessionKind
    sees_clients = False  # its steps depend on what clients have

    def __init__(self, name: str, pool: ExploredPool) -> None:
        self.name = name
        self.pool = pool

    @abstractmethod
    def born(self, number: int) -> Any:
        """The process right after its start, with a session id that was never used."""

    @abstractmethod
    def work(self, me: Any, pool: int, clients: tuple[Client, ...]) -> Iterator[Move]:
        """What it may do while it is connected."""

    def recovered(self, me: Any) -> Any:
        """The process once its session is active (again); `hold` says whether it is another, or another run."""
        return me

    def sid(self, me: Any) -> bytes:
        """Its present session id."""
        return f"{self.name}.{me.hold.number}".encode().ljust(16)

    def moves(self, me: Any, pool: int, clients: tuple[Client, ...]) -> Iterator[Move]:
        """All that it may do next."""
        hold: Hold = me.hold
        view = self.pool.view(pool)
        if hold.run != view.run:
            me = me._replace(hold=hold._replace(run=view.run, stage=Stage.HELLO))
        if me.hold.stage is not Stage.UP:
            yield from self.come_back(me, pool, clients)
            return
        _, is_active, is_running = view.sessions.get(self.sid(me), (self.kind, False, False))
        if not (is_active and is_running):
            yield self.renew(me, pool)
        yield from self.work(me, pool, clients)

    def come_back(self, me: Any, pool: int, clients: tuple[Client, ...]) -> Iterator[Move]:
        """The steps of a greeting; it may break off anywhere and begin again."""
        hold: Hold = me.hold
        if hold.stage is Stage.HELLO:
            greeting, changed = self.pool.call(pool, self.hello(me, create=not hold.is_known))
            hold = hold._replace(is_known=True, new_run=hold.new_run or greeting.new_run or not greeting.active)
            if greeting.active:
                yield Move(f"{self.name}: hello", self.up(me, hold), changed)
            else:
                yield Move(f"{self.name}: hello, not active", self.greeted(me, hold), changed)
        elif hold.stage is Stage.REVALIDATE:
            is_active, changed = self.pool.call(pool, Revalidate(self.sid(me), TTL_MS))
            yield Move(f"{self.name}: revalidate {is_active}", self.up(me) if is_active else self.anew(me), changed)

    def greeted(self, me: Any, hold: Hold) -> Any:
        """A greeting has told that the session is not active."""
        return me._replace(hold=hold._replace(stage=Stage.REVALIDATE))

    def up(self, me: Any, hold: Hold | None = None) -> Any:
        """The session is active."""
        back = self.recovered(me._replace(hold=(hold or me.hold)._replace(stage=Stage.UP)))
        return back._replace(hold=back.hold._replace(new_run=False, is_lost=False))

    def anew(self, me: Any) -> Any:
        """The session was taken over: another id is drawn."""
        return me._replace(hold=Hold(me.hold.number + 1, False, me.hold.run, Stage.HELLO, me.hold.new_run, True))

    def renew(self, me: Any, pool: int) -> Move:
        """The lease has run out, which the process does not know."""
        answer, changed = self.pool.call(pool, Renew(self.sid(me), TTL_MS))
        return Move(f"{self.name}: renew {answer}", me if answer else self.fenced(me), changed)

    def fenced(self, me: Any) -> Any:
        """An answer has told that the session is active no more."""
        return me._replace(hold=me.hold._replace(stage=Stage.HELLO))

    def disconnected(self, me: Any) -> Any:
        """An answer did not come: greet again, then send again."""
        return me._replace(hold=me.hold._replace(stage=Stage.HELLO))

    def hello(self, me: Any, *, create: bool) -> Call[Any]:
        return Hello(self.sid(me), self.kind, self.name, "", TTL_MS, create)
