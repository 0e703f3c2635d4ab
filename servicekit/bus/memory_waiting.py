"""What waits for its first slot, in memory: what `functions/waiting.lua` does, in Python."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from servicekit.bus import calls as c

RATE_MS = 10_000  # how far back the rate of starts looks, roughly
AT_ONCE = 1  # a due time; 0 is none


@dataclass(slots=True)
class _Counts:
    since_ms: int
    num_started: int = 0  # since then
    num_requests: int = 0
    num_tokens: int = 0

    def wait_ms(self, now_ms: int) -> int:
        """In which all that waits would start, at the rate of late; 0: nothing has started lately."""
        if not self.num_started:
            return 0
        return -(-self.num_requests * max(1, now_ms - self.since_ms) // self.num_started)

    def note_starts(self, number: int, now_ms: int) -> None:
        """So many more have started; the older a start, the less it counts."""
        self.num_started += number
        if now_ms - self.since_ms > RATE_MS:
            self.since_ms += (now_ms - self.since_ms) // 2
            self.num_started = -(-self.num_started // 2)


@dataclass(slots=True)
class _Waiter:
    tenant: str
    num_tokens: int


class MemoryWaiting:
    """Counts of the pool and of each tenant, and when the time of each request is over.

    `now_ms` is the server's clock.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._waiters: dict[bytes, _Waiter] = {}
        self._counts: dict[tuple[str, ...], _Counts] = {}  # of the pool: (), of a tenant: (tenant,)
        self._due_ms: dict[bytes, int] = {}

    def refusal(self, tenant: str, num_tokens: int, bounds: c.Bounds) -> c.Overload | None:
        """Why a request may not wait too."""
        for whose, max_requests, max_tokens in (
            ((), bounds.requests, bounds.tokens),
            ((tenant,), bounds.tenant_requests, bounds.tenant_tokens),
        ):
            counts = self._counts.get(whose)
            if counts is None:
                continue
            wait_ms = counts.wait_ms(self._now_ms())
            if 0 < max_requests <= counts.num_requests:
                return c.Overload(bool(whose), False, wait_ms)
            # One that is longer than the bound may wait alone.
            if 0 < max_tokens < counts.num_tokens + num_tokens:
                return c.Overload(bool(whose), True, wait_ms)
        return None

    def begin(self, request_id: bytes, tenant: str, num_tokens: int, due_ms: int) -> None:
        """A request waits from now on."""
        self._waiters[request_id] = _Waiter(tenant, num_tokens)
        for whose in ((), (tenant,)):
            counts = self._counts.setdefault(whose, _Counts(self._now_ms()))
            counts.num_requests += 1
            counts.num_tokens += num_tokens
        if due_ms:
            self._due_ms[request_id] = due_ms

    def set_tokens(self, request_id: bytes, num_tokens: int) -> None:
        """How many tokens its prompt really has."""
        if waiter := self._waiters.get(request_id):
            for whose in ((), (waiter.tenant,)):
                self._counts[whose].num_tokens += num_tokens - waiter.num_tokens
            waiter.num_tokens = num_tokens

    def end(self, request_ids: Iterable[bytes], *, have_started: bool) -> None:
        """They wait no longer, if they did: they have started or ended together."""
        left: dict[tuple[str, ...], int] = {}
        for request_id in request_ids:
            waiter = self._waiters.pop(request_id, None)
            if waiter is None:
                continue
            self._due_ms.pop(request_id, None)
            pool_and_own: tuple[tuple[str, ...], ...] = ((), (waiter.tenant,))
            for whose in pool_and_own:
                self._counts[whose].num_requests -= 1
                self._counts[whose].num_tokens -= waiter.num_tokens
                left[whose] = left.get(whose, 0) + 1
        for whose, number in left.items():
            if not self._counts[whose].num_requests:
                del self._counts[whose]
            elif have_started:
                self._counts[whose].note_starts(number, self._now_ms())

    def set_due(self, request_id: bytes) -> None:
        """Its time is over, if it waits."""
        if request_id in self._waiters:
            self._due_ms[request_id] = AT_ONCE

    def clear_due(self, request_id: bytes) -> None:
        """Somebody else sees to its time."""
        self._due_ms.pop(request_id, None)

    def overdue(self, count: int) -> list[bytes]:
        """Whose time is over, the longest ago first."""
        now_ms = self._now_ms()
        late = sorted((due_ms, request_id) for request_id, due_ms in self._due_ms.items() if due_ms <= now_ms)
        return [request_id for _, request_id in late[:count]]

    def count(self, tenant: str) -> c.Waiting:
        """What waits in the pool, and of it what is a tenant's."""
        none = _Counts(0)
        pool, own = self._counts.get((), none), self._counts.get((tenant,), none)
        return c.Waiting(pool.num_requests, pool.num_tokens, own.num_requests, own.num_tokens)
