"""An ordered queue whose cost does not depend on how much waits in it."""

import heapq
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)
_SLACK = 64  # dead entries that are always tolerated


class OrderedQueue(Generic[T]):
    """Items by ascending key, O(log n) in and out. A discarded item is dropped when its turn comes, or by a rebuild
    once most entries are dead, so that memory stays linear in what waits."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, T]] = []
        self._tickets: dict[T, int] = {}
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, item: T) -> bool:
        return item in self._tickets

    def __iter__(self) -> Iterator[T]:
        """The items, in no particular order."""
        return iter(self._tickets)

    def push(self, key: Any, item: T) -> None:
        """Queue an item that is not queued; `key` is comparable with all other keys, ties keep their order."""
        self._next_ticket += 1
        self._tickets[item] = self._next_ticket
        heapq.heappush(self._heap, (key, self._next_ticket, item))

    def discard(self, item: T) -> None:
        """Take an item out, wherever it stands; one that is not queued is no error."""
        self._tickets.pop(item, None)
        if len(self._heap) > 2 * len(self._tickets) + _SLACK:
            self._heap = [entry for entry in self._heap if self._tickets.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def peek(self) -> tuple[Any, T] | None:
        """The first item and its key."""
        while self._heap:
            key, ticket, item = self._heap[0]
            if self._tickets.get(item) == ticket:
                return key, item
            heapq.heappop(self._heap)
        return None

    def pop(self) -> T | None:
        """Take the first item."""
        first = self.peek()
        if first is None:
            return None
        heapq.heappop(self._heap)
        del self._tickets[first[1]]
        return first[1]
