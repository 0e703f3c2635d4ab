"""A queue in which tenants take turns by what they have been served.

Strict classes; within a class every tenant has a counter of served tokens divided by its weight, and the waiting tenant
with the smallest is next. (The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models",
2024; here one for each class, so that what a tenant gets in one class is not held against it in another.)
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from scheduler_svc.core.ordered_queue import OrderedQueue

T = TypeVar("T", bound=Hashable)
_MAX_IDLE_TENANTS = 4096  # of a class: counters of tenants without requests that are remembered


@dataclass(slots=True, eq=False)
class _Account(Generic[T]):
    """One tenant in one class."""

    priority: int
    tenant: str
    weight: float
    counter: float = 0.0  # served tokens / weight, and what it was lifted by
    num_open: int = 0  # requests that have not ended
    waiting: OrderedQueue[T] = field(default_factory=OrderedQueue)


@dataclass(slots=True, eq=False)
class _Class(Generic[T]):
    """The tenants of one priority."""

    accounts: dict[str, _Account[T]] = field(default_factory=dict)
    idle: OrderedDict[str, None] = field(default_factory=OrderedDict)  # without open requests, the longest first
    # By counters as they were: they only grow, so an old one is a lower bound and is put right when its turn comes.
    waiting: OrderedQueue[_Account[T]] = field(default_factory=OrderedQueue)
    last_left: _Account[T] | None = None  # the last whose queue became empty

    def first(self) -> _Account[T] | None:
        """The waiting tenant with the smallest counter."""
        while entry := self.waiting.peek():
            counter, account = entry
            if counter == account.counter:
                return account
            self.waiting.pop()
            self.waiting.push(account.counter, account)
        return None


class FairQueue(Generic[T]):
    """Items by (priority, counter of their tenant, order of their own).

    Keys are (priority, counter, tenant, order): of the counter in a key nothing is kept, since counters go on. A tenant
    is known in a class from `open` to `close`, and remembered until the class has no request left. The cost of
    every operation is that of heaps of classes, of tenants and of one tenant's items.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights  # of tenants; 1 where there is none
        self._classes: dict[int, _Class[T]] = {}
        self._waiting: OrderedQueue[int] = OrderedQueue()  # the classes in which anything waits
        self._places: dict[T, _Account[T]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: T) -> bool:
        return item in self._places

    def __iter__(self) -> Iterator[T]:
        """The items, in no particular order."""
        return iter(self._places)

    def push(self, key: tuple[int, float, str, Any], item: T) -> None:
        """Queue an item that is not queued, of an open tenant."""
        priority, _, tenant, order = key
        level = self._classes[priority]
        account = level.accounts[tenant]
        account.waiting.push(order, item)
        self._places[item] = account
        if account not in level.waiting:
            level.waiting.push(account.counter, account)
        if priority not in self._waiting:
            self._waiting.push(priority, priority)

    def discard(self, item: T) -> None:
        """Take an item out, wherever it stands; one that is not queued is no error."""
        account = self._places.pop(item, None)
        if account is None:
            return
        account.waiting.discard(item)
        if not len(account.waiting):
            level = self._classes[account.priority]
            level.waiting.discard(account)
            level.last_left = account
            if not len(level.waiting):
                self._waiting.discard(account.priority)

    def peek(self) -> tuple[tuple[int, float, str, Any], T] | None:
        """The first item and its key."""
        first_class = self._waiting.peek()
        account = self._classes[first_class[1]].first() if first_class else None
        entry = account.waiting.peek() if account else None
        if account is None or entry is None:
            return None
        return (account.priority, account.counter, account.tenant, entry[0]), entry[1]

    def pop(self) -> T | None:
        """Take the first item."""
        first = self.peek()
        if first is None:
            return None
        self.discard(first[1])
        return first[1]

    # Who is known, and what was served.

    def open(self, priority: int, tenant: str) -> None:
        """A request of the tenant begins."""
        level = self._classes.setdefault(priority, _Class())
        account = level.accounts.get(tenant)
        if account is None:
            account = level.accounts[tenant] = _Account(priority, tenant, self._weights.get(tenant, 1.0))
        level.idle.pop(tenant, None)
        account.num_open += 1

    def close(self, priority: int, tenant: str) -> None:
        """A request of the tenant has ended; a class without requests starts afresh with its next."""
        level = self._classes[priority]
        account = level.accounts[tenant]
        account.num_open -= 1
        if account.num_open:
            return
        level.idle[tenant] = None
        if len(level.idle) == len(level.accounts):
            del self._classes[priority]
        elif len(level.idle) > _MAX_IDLE_TENANTS:
            del level.accounts[level.idle.popitem(last=False)[0]]

    def lift(self, priority: int, tenant: str) -> None:
        """Before a push: a tenant with nothing waiting gets no credit for the time in which it wanted nothing.

        Its counter becomes at least the smallest among the waiting tenants, or where none waits, that of the last which
        did. Not called for an item that was taken out only to be put back.
        """
        level = self._classes[priority]
        account = level.accounts[tenant]
        if account in level.waiting:
            return
        if reference := level.first() or level.last_left:
            account.counter = max(account.counter, reference.counter)

    def charge(self, priority: int, tenant: str, num_tokens: int) -> None:
        """The tenant was served this many tokens."""
        account = self._classes[priority].accounts[tenant]
        account.counter += num_tokens / account.weight

    def counter(self, priority: int, tenant: str) -> float:
        """Served tokens / weight of an open tenant, and what it was lifted by."""
        return self._classes[priority].accounts[tenant].counter
