"""The order of service. The smallest key is admitted first, the largest is preempted first."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from scheduler_svc.core.fair_queue import FairQueue
from scheduler_svc.core.ordered_queue import OrderedQueue
from scheduler_svc.core.sequence import ScheduledRequest, SequenceState


class WaitingQueue(Protocol):
    """Waiting sequences by ascending key; only to go through all of them takes time in how many wait."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[SequenceState]:
        """All of them, in no particular order."""

    def __contains__(self, item: SequenceState) -> bool: ...

    def push(self, key: Any, item: SequenceState) -> None:
        """Queue a sequence that is not queued."""

    def discard(self, item: SequenceState) -> None:
        """Take a sequence out, wherever it stands; one that is not queued is no error."""

    def peek(self) -> tuple[Any, SequenceState] | None:
        """The first sequence and its key."""

    def pop(self) -> SequenceState | None:
        """Take the first sequence."""


class Policy(Protocol):
    """An order over sequences, and the queue that keeps it."""

    waiting: WaitingQueue

    def key(self, sequence: SequenceState) -> tuple[Any, ...]:
        """Comparable with the keys of all other sequences; a preempted one stands before those never started."""

    def open(self, request: ScheduledRequest) -> None:
        """A request has come."""

    def close(self, request: ScheduledRequest) -> None:
        """All sequences of a request have ended."""

    def enter(self, sequence: SequenceState) -> None:
        """A sequence is about to wait that did not wait before."""

    def charge(self, served: Iterable[tuple[SequenceState, int]]) -> None:
        """Sequences were served: prompt tokens that have to be computed, or output tokens."""


class FirstComeFirstServed:
    """By arrival. What was served does not matter."""

    def __init__(self) -> None:
        self.waiting: WaitingQueue = OrderedQueue[SequenceState]()

    def key(self, sequence: SequenceState) -> tuple[Any, ...]:
        """Started first, then by arrival, order of claiming and sample."""
        request = sequence.request
        return (not sequence.started, request.queued.arrival_ns, request.order, sequence.index)

    def open(self, request: ScheduledRequest) -> None:
        """Nothing to be kept."""

    def close(self, request: ScheduledRequest) -> None:
        """Nothing was kept."""

    def enter(self, sequence: SequenceState) -> None:
        """Nothing to be put right."""

    def charge(self, served: Iterable[tuple[SequenceState, int]]) -> None:
        """Nothing is counted."""


class Priority(FirstComeFirstServed):
    """By priority (lower first), within one by arrival."""

    def key(self, sequence: SequenceState) -> tuple[Any, ...]:
        """Priority, then as first come, first served."""
        request = sequence.request
        return (
            request.queued.priority,
            not sequence.started,
            request.queued.arrival_ns,
            request.order,
            sequence.index,
        )


class Fair(FirstComeFirstServed):
    """By priority (lower first), within one by what the tenant was served for its weight, then by arrival.

    Tokens found in the prefix cache, or of a prompt that another sample has computed, are free, and so is recomputing
    after a preemption. The first in the order stays it until something is served, so running sequences always progress;
    a tenant is not passed forever, since the others' counters grow beyond its own.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._queue: FairQueue[SequenceState] = FairQueue(weights)
        self.waiting: WaitingQueue = self._queue

    def key(self, sequence: SequenceState) -> tuple[Any, ...]:
        """Priority, counter, tenant, then as first come, first served."""
        queued = sequence.request.queued
        counter = self._queue.counter(queued.priority, queued.tenant)
        return (queued.priority, counter, queued.tenant, super().key(sequence))

    def open(self, request: ScheduledRequest) -> None:
        """Its tenant is known from now on."""
        self._queue.open(request.queued.priority, request.queued.tenant)

    def close(self, request: ScheduledRequest) -> None:
        """Its tenant may be idle."""
        self._queue.close(request.queued.priority, request.queued.tenant)

    def enter(self, sequence: SequenceState) -> None:
        """Nobody saves up by waiting for nothing."""
        self._queue.lift(sequence.request.queued.priority, sequence.request.queued.tenant)

    def charge(self, served: Iterable[tuple[SequenceState, int]]) -> None:
        """To the tenants, in the class of the request."""
        for sequence, num_tokens in served:
            queued = sequence.request.queued
            self._queue.charge(queued.priority, queued.tenant, num_tokens)


POLICIES: dict[str, Callable[[Mapping[str, float]], Policy]] = {  # of the tenants' weights
    "fcfs": lambda _: FirstComeFirstServed(),
    "priority": lambda _: Priority(),
    "fair": Fair,
}
