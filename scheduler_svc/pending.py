"""Questions of the dispatcher to the bus."""

from collections.abc import Callable
from typing import Any, NamedTuple

from servicekit.bus.calls import Append, Call, Claim, Commit, HandOver, Load, Owned, Renew, Strike


class Pending(NamedTuple):
    """A call to be written, and what is done with its answer."""

    call: Call[Any]
    answered: Callable[[Any], None] | None = None

    @property
    def may_wait(self) -> bool:
        """Return whether its answer leads to no work, so that it may come after a blocking read."""
        return isinstance(self.call, Commit | Renew | Append | Strike)

    def is_fenced(self, answer: Any) -> bool:
        """Return whether an answer says that the session is active no more."""
        if isinstance(self.call, Commit | Renew | Strike):
            return not answer
        return isinstance(self.call, Claim | Owned | Load | HandOver) and answer is None
