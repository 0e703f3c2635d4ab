"""The moment for which a plan waits for requests that are known to be on their way.

A step that begins prompts costs a fixed time besides that of its tokens, and what has just missed a plan waits until
its step has ended. So while there is room for requests that were submitted and are not here yet, a plan waits: on a
device that has nothing to do for a part of that fixed time, on one that computes for what it surely still needs.
"""

from scheduler_svc.core.worker import WorkerState

IDLE_NS = 1_000_000
PROMPTS_NS = 1_500_000  # a step that computes prompts needs that long and more from its plan on
NS_PER_TOKEN = 500  # no device is that fast with prompts
PAUSE_NS = 1_500_000  # in which nothing came: what is to come takes longer, for example to be tokenized


class Gathering:
    """Arrivals since the last plan; times are monotonic nanoseconds."""

    def __init__(self) -> None:
        self._num_coming = 0
        self._num_tokens = 0
        self._came_ns = 0
        self._since_ns: dict[str, int] = {}  # by worker: when its plan could have been made

    def note(self, num_tokens: int, num_coming: int, now_ns: int) -> None:
        """A claim brought prompts of so many tokens, and left so many requests that it could not take."""
        self._num_coming = num_coming
        if num_tokens:
            self._num_tokens += num_tokens
            self._came_ns = now_ns

    def has_planned(self, worker_id: str) -> None:
        """Forget what had come: it is in a plan, or waits for want of room."""
        self._num_tokens = 0
        self._since_ns.pop(worker_id, None)

    def waits(self, worker: WorkerState, now_ns: int) -> bool:
        """Return whether the plan that could be made now is made later."""
        if not self._num_coming or self._num_tokens >= worker.max_num_batched_tokens:
            return False
        since_ns = self._since_ns.setdefault(worker.worker_id, now_ns)
        if worker.in_flight:
            patience_ns = worker.batch_num_tokens * NS_PER_TOKEN + (0 if worker.num_plain_plans else PROMPTS_NS)
        else:
            patience_ns = 0 if worker.num_running else IDLE_NS
        return now_ns < min(since_ns + patience_ns, self._came_ns + PAUSE_NS)
