"""The calls that the scheduler writes next, and what is done with their answers."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import structlog

from scheduler_svc.metrics import Meters
from servicekit.bus.calls import Append, Call, Claim, Commit, HandOver, Load, Owned, Renew, Strike
from servicekit.bus.dead_letters import dead_letter
from servicekit.bus.keys import Keys

_log = structlog.stdlib.get_logger(__name__)


class Pending(NamedTuple):
    """A call to be written, and what is done with its answer."""

    call: Call[Any]
    answered: Callable[[Any], None] | None = None

    @property
    def may_wait(self) -> bool:
        """Return whether its answer leads to no work, so that it may come after a blocking read."""
        return isinstance(self.call, Commit | Renew | Append | Strike)

    @property
    def must_arrive(self) -> bool:
        """Return whether it tells what nobody else would; the others ask, and are asked anew."""
        return isinstance(self.call, Commit | Append | Strike | HandOver)

    def is_fenced(self, answer: Any) -> bool:
        """Return whether an answer says that the session is active no more."""
        if isinstance(self.call, Commit | Renew | Strike):
            return not answer
        return isinstance(self.call, Claim | Owned | Load | HandOver) and answer is None


class Outbox:
    """All that is to be written, in order."""

    def __init__(self, names: Keys, meters: Meters) -> None:
        self.pending: list[Pending] = []
        self._keys = names
        self._meters = meters

    def put(self, call: Call[Any], answered: Callable[[Any], None] | None = None) -> None:
        """Write a call next; `answered` is called with its answer."""
        self.pending.append(Pending(call, answered))

    def bury(self, stream: str, fields: Mapping[bytes, bytes], why: str) -> None:
        """Keep what cannot be read, for the operator."""
        _log.error("dead letter", stream=stream, why=why)
        self._meters.dead_letters[stream.partition(":")[0]] += 1
        self.put(dead_letter(self._keys, stream, fields, why))

    def drop_questions(self) -> None:
        """Keep only what must arrive, to be sent again."""
        self.pending = [each for each in self.pending if each.must_arrive]
