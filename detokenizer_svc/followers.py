"""gRPC clients that follow a live request, fed by the service's loop."""

import threading
from collections.abc import Callable, Iterable

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.rows import TextRow
from detokenizer_svc.core.detokenizer import Detokenizer
from detokenizer_svc.core.effects import Effects
from detokenizer_svc.core.sequence import Offset

Item = TextRow | PenstockError | None  # a row; why it ends early; None: the request has ended


class Follower:
    """One client. `deliver` is called from the loop's thread."""

    __slots__ = ("deliver", "from_offset", "request_id")

    def __init__(self, request_id: bytes, from_offset: int, deliver: Callable[[Item], None]) -> None:
        self.request_id = request_id
        self.from_offset = from_offset  # output tokens of each sample that the client has
        self.deliver = deliver


class Followers:
    """All of them. Any thread may join and leave; the rest is the loop's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[Follower] = []
        self._gone: list[Follower] = []
        self._by_request: dict[bytes, list[Follower]] = {}

    def join(self, follower: Follower) -> None:
        """Begin to follow with the loop's next turn."""
        with self._lock:
            self._new.append(follower)

    def leave(self, follower: Follower) -> None:
        """End it; rows may still be delivered until the loop's next turn."""
        with self._lock:
            self._gone.append(follower)

    def take_new(self) -> list[Follower]:
        """Those that joined since, after those that left were dropped."""
        if not self._new and not self._gone:
            return []
        with self._lock:
            new, self._new = self._new, []
            gone, self._gone = self._gone, []
        for follower in gone:
            if follower in new:
                new.remove(follower)
            self._remove(follower)
        return new

    def begin(self, follower: Follower, detokenizers: Iterable[Detokenizer]) -> None:
        """Give one that is new what its request has, and from now on what comes; or the error that it is not here."""
        request_id = follower.request_id
        for detokenizer in detokenizers:
            if request_id in detokenizer:
                offsets = [Offset(follower.from_offset)] * detokenizer.num_sequences(request_id)
                for row in detokenizer.snapshot(request_id, offsets).rows():
                    follower.deliver(row)
                self._by_request.setdefault(request_id, []).append(follower)
                return
        follower.deliver(
            PenstockError(ErrorCode.NOT_FOUND, "no live request of this id is in a shard of this detokenizer")
        )

    def __bool__(self) -> bool:
        return bool(self._by_request)

    def take(self, effects: Effects) -> None:
        """Hand rows and ends to those who follow their requests."""
        for row in effects.rows():
            for follower in self._by_request.get(row.request_id, ()):
                follower.deliver(row)
        for retirement in effects.retirements:
            for follower in self._by_request.pop(retirement.request_id, ()):
                follower.deliver(None)

    def lose(self, request_id: bytes) -> None:
        """Tell those who follow a request that another detokenizer has it from now on."""
        error = PenstockError(ErrorCode.UNAVAILABLE, "another detokenizer has the request now; ask again")
        for follower in self._by_request.pop(request_id, ()):
            follower.deliver(error)

    def _remove(self, follower: Follower) -> None:
        following = self._by_request.get(follower.request_id, [])
        if follower in following:
            following.remove(follower)
        if not following:
            self._by_request.pop(follower.request_id, None)
