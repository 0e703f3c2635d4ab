"""Workers, and schedulers that pair with them."""

from dataclasses import dataclass

from servicekit.bus.calls.call import Call


@dataclass(frozen=True, slots=True)
class RegisterWorker(Call[bytes]):
    """A worker's session (its incarnation) takes its name; answers the last id of `steps:{worker}` to read behind.

    Another incarnation's pairing ends by that. Empty: fenced.
    """

    sid: bytes
    worker: str
    info: bytes  # penstock.v1.WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """One worker as the pool knows it."""

    worker: str
    incarnation: bytes  # its session
    alive: bool
    info: bytes
    owner: bytes | None  # the scheduler session paired with it, if that one is alive


@dataclass(frozen=True, slots=True)
class ListWorkers(Call[list[WorkerEntry]]):
    """All workers that ever registered and were not forgotten."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """A scheduler and a worker's incarnation: one epoch."""

    incarnation: bytes
    info: bytes
    results_after: bytes  # read `results:{worker}` behind this entry


@dataclass(frozen=True, slots=True)
class Pair(Call[Pairing | None]):
    """The scheduler session becomes the worker's owner. None: it is fenced, the worker is dead or another's.

    A worker of an expired session is that session's until it is taken over: `Take` first.
    """

    sid: bytes
    worker: str


@dataclass(frozen=True, slots=True)
class Unpair(Call[None]):
    """Gives a worker back, so that another scheduler may pair with it; nothing happens if it is another's already."""

    sid: bytes
    worker: str
