"""Workers, and schedulers that pair with them."""

from dataclasses import dataclass
from enum import Enum

from servicekit.bus.calls.call import Call
from servicekit.bus.calls.sessions import SessionInfo
from servicekit.bus.keys import MODEL_BYTES


@dataclass(frozen=True, slots=True)
class RegisterWorker(Call[bytes]):
    """A worker's session (its incarnation) takes its name; answers the last id of `steps:{worker}` to read after.

    A pairing ends by that, the same incarnation's too. Empty: fenced.
    """

    sid: bytes
    worker: str
    info: bytes  # penstock.v1.WorkerInfo
    model_digest: bytes = bytes(MODEL_BYTES)


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
    results_after: bytes  # read `results:{worker}` after this entry


class Unwanted(Enum):
    """Its only value is `UNWANTED`: the worker has a model that the pool does not take in beside those in use."""

    UNWANTED = "unwanted"


UNWANTED = Unwanted.UNWANTED


@dataclass(frozen=True, slots=True)
class Pair(Call[Pairing | Unwanted | None]):
    """The scheduler session becomes the worker's owner. None: it is fenced, the worker is dead or another's.

    A worker of an expired session is that session's until it is taken over: `Take` first. A pool takes in `MAX_MODELS`
    models. One is in use as long as a worker of it is paired, or a scheduler holds requests that began on it. A worker
    that is unwanted learns so with its renewals, until a pairing succeeds.
    """

    sid: bytes
    worker: str


@dataclass(frozen=True, slots=True)
class Unpair(Call[None]):
    """Gives a worker back, so that another scheduler may pair with it; nothing happens if it is another's already."""

    sid: bytes
    worker: str


@dataclass(frozen=True, slots=True)
class RegisteredWorker:
    """One worker in a survey. Whether it and its owner live, their sessions say."""

    worker: str
    incarnation: bytes
    info: bytes
    owner: bytes | None


@dataclass(frozen=True, slots=True)
class Surveyed:
    """The changes of sessions and workers.

    Statuses are those of the last change, a session's first status among them; `num_owned` is not told.
    """

    generation: int  # to ask after next time
    is_whole: bool  # begins from nothing: whatever is not in it is not there
    is_last: bool  # nothing has changed after `generation`; otherwise there is more to ask for
    sessions: list[SessionInfo]
    gone_sessions: list[bytes]
    workers: list[RegisteredWorker]
    gone_workers: list[str]


@dataclass(frozen=True, slots=True)
class Survey(Call[Surveyed | None]):
    """Asks for the changes after a generation; 0: everything. None: nothing, which costs the server next to nothing.

    A lease that runs out is a change. Sessions that are dead for a minute and own nothing are forgotten here.
    """

    since: int = 0
    count: int = 8  # changes at most: a longer answer would hold others up
