"""The requests that have not ended: the sequences that wait, the models that they began on, and their deadlines."""

from collections import Counter
from collections.abc import Iterator, Mapping, ValuesView

from scheduler_svc.core.isolation import IsolatingQueue, Tolerance
from scheduler_svc.core.ordered_queue import OrderedQueue
from scheduler_svc.core.policy import Policy
from scheduler_svc.core.sequence import QueuedRequest, ScheduledRequest, SequenceState, Status


class Requests(Mapping[bytes, ScheduledRequest]):
    """By id, in the order in which they came."""

    def __init__(self, policy: Policy, tolerance: Tolerance) -> None:
        self.waiting = IsolatingQueue(policy, tolerance)
        self.models: Counter[bytes] = Counter()  # requests that began on a model and must go on with it, by its digest
        self._by_id: dict[bytes, ScheduledRequest] = {}
        self._policy = policy
        self._deadlines: OrderedQueue[bytes] = OrderedQueue()
        self._order = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._by_id)

    def __getitem__(self, request_id: bytes) -> ScheduledRequest:
        return self._by_id[request_id]

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def values(self) -> ValuesView[ScheduledRequest]:
        """All of them."""
        return self._by_id.values()

    def of_model(self, model_digest: bytes) -> list[bytes]:
        """The ids of the requests that began on a model."""
        return [each.request_id for each in self.values() if each.model_digest == model_digest]

    def open(self, queued: QueuedRequest, now_ns: int, *, shares_prefixes: bool) -> ScheduledRequest:
        """Take in a request whose id is new; none of its sequences waits yet.

        Args:
            queued: the request.
            now_ns: Unix time.
            shares_prefixes: other tenants' requests may find its cached blocks.
        """
        self._order += 1
        request = ScheduledRequest(queued, self._order, now_ns, shares_prefixes=shares_prefixes)
        self._by_id[request.request_id] = request
        if queued.model_digest is not None:
            self.pin(request, queued.model_digest)
        self._policy.open(request)
        if queued.deadline_ns:
            self._deadlines.push(queued.deadline_ns, request.request_id)
        return request

    def close(self, request: ScheduledRequest) -> None:
        """Let go of a request none of whose sequences waits or runs."""
        del self._by_id[request.request_id]
        self._unpin(request)
        self._policy.close(request)
        self.waiting.close(request)
        self._deadlines.discard(request.request_id)

    def take_late(self, now_ns: int) -> Iterator[bytes]:
        """The ids of those whose deadlines have passed, each once."""
        while (first := self._deadlines.peek()) and first[0] <= now_ns:
            self._deadlines.pop()
            yield first[1]

    def wait(self, sequence: SequenceState) -> None:
        """Queue a sequence that did not wait; a beam that has found its tokens waits for the others only."""
        for each in dict.fromkeys((sequence, *sequence.request.unseated_beams)):
            if each.has_found:
                each.status = Status.HELD
            else:
                self._wait(each)

    def _wait(self, sequence: SequenceState) -> None:
        sequence.status, sequence.num_deferrals = Status.WAITING, 0
        self.unpin_if_unbegun(sequence.request)
        self._policy.enter(sequence)
        self.waiting.push(sequence)

    def wait_for_slots(self, request: ScheduledRequest) -> None:
        """Let the further samples wait for slots: the prompt is planned, or its first sample is gone."""
        for sequence in request.sequences[1:] if request.search is None else ():
            if sequence.status is Status.HELD:
                self.wait(sequence)

    def pin(self, request: ScheduledRequest, model_digest: bytes) -> None:
        """Bind a request to the model that it begins on."""
        request.model_digest = model_digest
        self.models[model_digest] += 1

    def unpin_if_unbegun(self, request: ScheduledRequest) -> None:
        """Let a request all of whose slots were lost before its first token begin again on any model."""
        if request.model_digest is not None and request.may_change_model:
            self._unpin(request)
            for sequence in request.sequences:
                if sequence in self.waiting:
                    self.waiting.discard(sequence)
                    self.waiting.push(sequence)

    def _unpin(self, request: ScheduledRequest) -> None:
        """Nothing of a request depends on its model (any more)."""
        if request.model_digest is not None:
            self.models -= Counter((request.model_digest,))
            request.model_digest = None
