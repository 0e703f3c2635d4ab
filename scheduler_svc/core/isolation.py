"""Requests under suspicion: workers have died while they computed them.

Among many requests it cannot be told which one killed a worker. So each that was being computed gets a strike, and one
with too many runs alone: there the innocent finish, and the guilty one can take nobody along. A worker is set aside for
one suspect at a time, takes in nothing until what runs on it has ended, and is given back when the suspect has ended.
One worker always stays for all others, if there are several.

Strikes are forgiven to a request that goes on well: what kills a worker does it again at the same place, so each death
that counts follows closely, in tokens, on the one before. Workers that die for other reasons in a long life do not add
up, and a request that kills one now and then can do so only as often as it makes that much progress.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_svc.core.ordered_queue import OrderedQueue
from scheduler_svc.core.policy import Policy, WaitingQueue
from scheduler_svc.core.sequence import RequestState, SequenceState
from scheduler_svc.core.worker import WorkerState


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How many workers may die while they compute a request."""

    num_strikes: int = 2  # together with others; then it runs alone
    num_strikes_alone: int = 2  # while it runs alone; then it ends with an error
    num_tokens: int = 128  # of output for each sequence that goes on, behind the last strike: then none counts any more

    def strike(self, request: RequestState) -> None:
        """One more worker has died."""
        request.num_strikes = 1 if self.is_forgiven(request) else request.num_strikes + 1
        request.struck_at = request.num_output_tokens

    def is_forgiven(self, request: RequestState) -> bool:
        """Whether the next strike is its first again."""
        return request.num_output_tokens - request.struck_at >= self.num_tokens * request.num_live

    def is_suspect(self, request: RequestState) -> bool:
        """Whether it must run alone."""
        return request.num_strikes >= self.num_strikes and not self.is_forgiven(request)

    def is_guilty(self, request: RequestState) -> bool:
        """Whether it is not tried again."""
        return request.num_strikes >= self.num_strikes + self.num_strikes_alone


@dataclass(frozen=True, slots=True)
class _Room:
    """A worker that is set aside."""

    request: RequestState
    waiting: OrderedQueue[SequenceState] = field(default_factory=OrderedQueue)


class IsolatingQueue:
    """The policy's queue, and beside it, in the policy's order too, those that must run alone."""

    def __init__(self, policy: Policy, tolerance: Tolerance) -> None:
        self._policy = policy
        self._others = policy.waiting
        self.tolerance = tolerance
        self._suspects: OrderedQueue[SequenceState] = OrderedQueue()  # without a room
        self._rooms: dict[str, _Room] = {}  # by worker
        self._nobody: OrderedQueue[SequenceState] = OrderedQueue()

    def __len__(self) -> int:
        return len(self._others) + len(self._suspects) + sum(len(room.waiting) for room in self._rooms.values())

    def __contains__(self, item: SequenceState) -> bool:
        return item in self._others or item in self._suspects or any(item in r.waiting for r in self._rooms.values())

    def push(self, item: SequenceState) -> None:
        """Queue a sequence that is not queued, where its request belongs now."""
        queue: WaitingQueue = self._others
        if self.tolerance.is_suspect(item.request):
            rooms = (room.waiting for room in self._rooms.values() if room.request is item.request)
            queue = next(rooms, self._suspects)
        queue.push(self._policy.key(item), item)

    def discard(self, item: SequenceState) -> None:
        """Take a sequence out, wherever it stands; one that is not queued is no error."""
        self._others.discard(item)
        self._suspects.discard(item)
        for room in self._rooms.values():
            room.waiting.discard(item)

    def for_worker(self, worker: WorkerState, workers: Mapping[str, WorkerState]) -> WaitingQueue:
        """Those that may join this worker now."""
        room = self._rooms.get(worker.worker_id)
        if room is not None and self.tolerance.is_forgiven(room.request):
            self.remove_worker(worker.worker_id)
            room = None
        room = room or self._set_aside(worker, len(workers))
        if room is None:
            return self._others
        is_alone = all(sequence.request is room.request for sequence in worker.running())
        return room.waiting if is_alone else self._nobody

    def close(self, request: RequestState) -> None:
        """A request has ended: its worker is everybody's again."""
        self._rooms = {worker: room for worker, room in self._rooms.items() if room.request is not request}

    def remove_worker(self, worker_id: str) -> None:
        """A worker is gone, or set aside no longer: what waited for it waits where it belongs."""
        room = self._rooms.pop(worker_id, None)
        while room is not None and (item := room.waiting.pop()) is not None:
            self.push(item)

    def _set_aside(self, worker: WorkerState, num_workers: int) -> _Room | None:
        """The worker becomes the next suspect's, if it is its turn."""
        first = self._suspects.peek()
        if first is None or len(self._rooms) >= max(1, num_workers - 1):
            return None
        other = self._others.peek()
        sequences = [sequence for sequence in first[1].request.sequences if sequence in self._suspects]
        if (other is not None and other[0] < first[0]) or not all(map(worker.holds, sequences)):
            return None
        room = self._rooms[worker.worker_id] = _Room(first[1].request)
        for sequence in sequences:
            self._suspects.discard(sequence)
            self.push(sequence)
        return room
