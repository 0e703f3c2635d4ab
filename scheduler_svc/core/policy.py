"""Who is served first. The smallest key is admitted first, the largest is preempted first."""

from collections.abc import Callable
from typing import Any, Protocol

from scheduler_svc.core.sequence import SequenceState


class Policy(Protocol):
    """An order over sequences."""

    def key(self, sequence: SequenceState) -> tuple[Any, ...]:
        """Comparable with the keys of all other sequences; a preempted one stands before those never started."""


class FirstComeFirstServed:
    """By arrival."""

    def key(self, sequence: SequenceState) -> tuple[Any, ...]:
        """Started first, then by arrival, order of claiming and sample."""
        request = sequence.request
        return (not sequence.started, request.queued.arrival_ns, request.order, sequence.index)


class Priority:
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


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": FirstComeFirstServed, "priority": Priority}
