"""What a gateway counts: plain numbers that the shell turns into metrics."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

# Upper bounds in seconds: 1 ms to 10 min.
BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0,
)  # fmt: skip


class Outcome(Enum):
    """How a request ended, as its client sees it."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"  # nobody's or the operator's fault
    REJECTED = "rejected"  # the caller's fault, or turned away


class Durations:
    """A histogram of durations."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)  # by upper bound; the last one is beyond all
        self.sum_s = 0.0

    @property
    def mean_s(self) -> float:
        """Of all that were observed; 0: none was."""
        return self.sum_s / max(1, sum(self.counts))

    def observe(self, seconds: float) -> None:
        """Adds one."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


@dataclass(slots=True)
class GatewayStats:
    """Counts since the start and figures of now."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    time_to_first_token: Durations = field(default_factory=Durations)
    inter_token: Durations = field(default_factory=Durations)
    request: Durations = field(default_factory=Durations)
    num_streams: int = 0  # requests being served
    num_rows: int = 0  # text rows taken
    num_tokens: int = 0  # output tokens in them
    num_known_rows: int = 0  # brought nothing new
    num_behind_rows: int = 0  # could not be taken: re-attached
    num_stray_rows: int = 0  # of requests that are not served here (any more)
    num_attaches: int = 0
    num_resumes: int = 0  # times that a client came back to requests that were there
    num_detached: int = 0  # calls whose client is gone and may come back
    num_lagging: int = 0  # times that a client was so slow that its text was left where it is kept
    num_dead_letters: int = 0  # entries of `text` that could not be read
    num_key_reloads: int = 0  # times that the file of API keys was read, the start included
    num_broken_key_reloads: int = 0  # times that it had changed and could not be used
    num_waiting: int = 0  # requests of the pool that wait for their first slot
    num_waiting_tokens: int = 0  # of their prompts
    queue_depths: dict[str, int] = field(default_factory=dict)  # by stream: prompts, requests, dead
