"""Queues beside that of the policy: for requests under suspicion, and for those of a model that other workers lack.

Workers have died while they computed those under suspicion.

Among many requests it cannot be told which one killed a worker. So each that was being computed gets a strike, and one
with too many runs alone: there the others finish, and the one at fault can take nobody along. A worker is set aside
for one suspect at a time, takes in nothing until what runs on it has ended, and is given back when that has ended.
One worker always stays for all others, if there are several.

Strikes are forgiven to a request that goes on well: what kills a worker does it again at the same place, so each death
that counts follows closely, in tokens, on the one before. Workers that die for other reasons in a long life do not add
up, and a request that kills one now and then can do so only as often as it makes that much progress.

While a pool is upgraded, its workers have two models, and a request goes on with the one that it began on. What a
worker of another model finds in the queue it leaves to a queue of that model, so that nobody has to pass it again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.core.ordered_queue import OrderedQueue
from scheduler_svc.core.policy import Policy, WaitingQueue
from scheduler_svc.core.sequence import ScheduledRequest, SequenceState
from scheduler_svc.core.worker import WorkerState


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The number of workers that may die while they compute a request."""

    num_strikes: int = 2  # together with others; then it runs alone
    num_strikes_alone: int = 2  # while it runs alone; then it ends with an error
    num_tokens: int = 128  # of output for each sequence that goes on, after the last strike: then none counts any more

    def strike(self, request: ScheduledRequest) -> None:
        """One more worker has died."""
        request.num_strikes = 1 if self.is_forgiven(request) else request.num_strikes + 1
        request.struck_at = request.num_output_tokens

    def is_forgiven(self, request: ScheduledRequest) -> bool:
        """Return whether the next strike is its first again."""
        return request.num_output_tokens - request.struck_at >= self.num_tokens * request.num_live

    def is_suspect(self, request: ScheduledRequest) -> bool:
        """Return whether it must run alone."""
        return request.num_strikes >= self.num_strikes and not self.is_forgiven(request)

    def is_at_fault(self, request: ScheduledRequest) -> bool:
        """Return whether it is not tried again."""
        return request.num_strikes >= self.num_strikes + self.num_strikes_alone


@dataclass(frozen=True, slots=True)
class _Room:
    """A worker that is set aside."""

    request: ScheduledRequest
    waiting: OrderedQueue[SequenceState] = field(default_factory=OrderedQueue)


class _Merged:
    """The queue of a model and the policy's as one; see `WaitingQueue`."""

    def __init__(self, policy: Policy, of_model: OrderedQueue[SequenceState]) -> None:
        self._policy = policy
        self._of_model = of_model
        self._others = policy.waiting

    def __len__(self) -> int:
        return len(self._of_model) + len(self._others)

    def __contains__(self, item: SequenceState) -> bool:
        return item in self._of_model or item in self._others

    def __iter__(self) -> Iterator[SequenceState]:
        yield from self._of_model
        yield from self._others

    def push(self, key: Any, item: SequenceState) -> None:
        (self._others if item.request.model_digest is None else self._of_model).push(key, item)

    def discard(self, item: SequenceState) -> None:
        self._of_model.discard(item)
        self._others.discard(item)

    def peek(self) -> tuple[Any, SequenceState] | None:
        first, other = self._of_model.peek(), self._others.peek()
        if first is None:
            return other
        # A key may change while its sequence waits.
        first = self._policy.key(first[1]), first[1]
        return first if other is None or first[0] <= other[0] else other

    def pop(self) -> SequenceState | None:
        first = self.peek()
        if first is None:
            return None
        self.discard(first[1])
        return first[1]


class IsolatingQueue:
    """The policy's queue, and beside it, in the policy's order too, those that wait apart."""

    def __init__(self, policy: Policy, tolerance: Tolerance) -> None:
        self._policy = policy
        self._others = policy.waiting
        self.tolerance = tolerance
        # By model, None: none yet. Suspects without a room, and what workers of other models met in the policy's queue.
        self._suspects: dict[bytes | None, OrderedQueue[SequenceState]] = {}
        self._of_models: dict[bytes | None, OrderedQueue[SequenceState]] = {}
        self._rooms: dict[str, _Room] = {}  # by worker
        self._nobody: OrderedQueue[SequenceState] = OrderedQueue()

    @property
    def num_of_other_models(self) -> int:
        """Sequences that were left to queues of their models."""
        return sum(map(len, self._of_models.values()))

    def __len__(self) -> int:
        return len(self._others) + sum(map(len, self._apart()))

    def __contains__(self, item: SequenceState) -> bool:
        return item in self._others or any(item in queue for queue in self._apart())

    def _apart(self) -> Iterator[OrderedQueue[SequenceState]]:
        yield from self._suspects.values()
        yield from self._of_models.values()
        for room in self._rooms.values():
            yield room.waiting

    def push(self, item: SequenceState) -> None:
        """Queue a sequence that is not queued, where its request belongs now."""
        queue: WaitingQueue = self._others
        if self.tolerance.is_suspect(item.request):
            rooms = [room.waiting for room in self._rooms.values() if room.request is item.request]
            queue = rooms[0] if rooms else self._suspects.setdefault(item.request.model_digest, OrderedQueue())
        queue.push(self._policy.key(item), item)

    def leave_to_its_model(self, item: SequenceState) -> None:
        """Take a sequence out of the policy's queue that a worker of another model has met there."""
        self._others.discard(item)
        self._of_models.setdefault(item.request.model_digest, OrderedQueue()).push(self._policy.key(item), item)

    def discard(self, item: SequenceState) -> None:
        """Take a sequence out, wherever it stands; one that is not queued is no error."""
        self._others.discard(item)
        for queue in self._apart():
            queue.discard(item)

    def for_worker(self, worker: WorkerState, workers: Mapping[str, WorkerState]) -> WaitingQueue:
        """Those that may join this worker now."""
        room = self._rooms.get(worker.worker_id)
        if room is not None and self.tolerance.is_forgiven(room.request):
            self.remove_worker(worker.worker_id)
            room = None
        others: WaitingQueue = self._others
        if of_model := self._of_models.get(worker.model_digest):  # None, or empty: as nearly always
            others = _Merged(self._policy, of_model)
        room = room or self._set_aside(worker, len(workers), others)
        if room is None:
            return others
        is_alone = all(sequence.request is room.request for sequence in worker.running())
        return room.waiting if is_alone else self._nobody

    def close(self, request: ScheduledRequest) -> None:
        """A request has ended: its worker is everybody's again."""
        self._rooms = {worker: room for worker, room in self._rooms.items() if room.request is not request}

    def remove_worker(self, worker_id: str) -> None:
        """A worker is gone, or set aside no longer: what waited for it waits where it belongs."""
        room = self._rooms.pop(worker_id, None)
        while room is not None and (item := room.waiting.pop()) is not None:
            self.push(item)

    def _set_aside(self, worker: WorkerState, num_workers: int, others: WaitingQueue) -> _Room | None:
        """The worker becomes the next suspect's, if it is its turn."""
        suspects = [self._suspects[each] for each in (None, worker.model_digest) if each in self._suspects]
        firsts = [first for queue in suspects if (first := queue.peek()) is not None]
        if not firsts or len(self._rooms) >= max(1, num_workers - 1):
            return None
        first, other = min(firsts, key=lambda each: each[0]), others.peek()
        sequences = [each for each in first[1].request.sequences if any(each in queue for queue in suspects)]
        if (other is not None and other[0] < first[0]) or not all(map(worker.holds, sequences)):
            return None
        room = self._rooms[worker.worker_id] = _Room(first[1].request)
        for sequence in sequences:
            self.discard(sequence)
            self.push(sequence)
        return room
