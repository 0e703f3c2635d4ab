"""The times of one request: told by the log, kept with the result."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

MAX_RUNS = 64  # that are kept of one request


class StartReason(IntEnum):
    """The reason why a sequence got a slot; values as in the contract."""

    FIRST = 0
    PREEMPTED = 1  # its blocks went to others, or it was to run alone
    WORKER_LOST = 2  # the worker that computed it died or left
    TAKEN_OVER = 3  # another scheduler had begun it, or the server lost what had been generated


class Start(NamedTuple):
    """A sequence gets a slot."""

    at_ns: int  # Unix time
    reason: StartReason


class Computed(NamedTuple):
    """The place and time at which a batch of rows was made."""

    worker: str = ""  # its name; told where a sequence starts
    incarnation: bytes = b""  # of the worker; empty: nobody computed it
    step: int = 0
    sent_ns: int = 0  # Unix time; 0: it was not sent


class Run(NamedTuple):
    """A sequence's time in one slot."""

    sequence: int
    position: int  # output tokens that it had before
    start: Start
    computed: Computed  # its first row there


@dataclass(slots=True)
class Timeline:
    """Unix times in nanoseconds; 0: it did not happen (yet)."""

    tokenizing_ns: int = 0  # when the tokenizer had read it
    tokenized_ns: int = 0
    opened_ns: int = 0  # when a scheduler claimed it, or it was rejected
    runs: list[Run] = field(default_factory=list)
    num_more_runs: int = 0  # beyond the first `MAX_RUNS`
    finished_ns: int = 0  # when the row that ended it was sent
    retired_ns: int = 0  # when its result was made

    def add(self, run: Run) -> None:
        """A sequence has its first row from a slot."""
        if len(self.runs) < MAX_RUNS:
            self.runs.append(run)
        else:
            self.num_more_runs += 1

    @property
    def admitted_ns(self) -> int:
        """The time of its first slot."""
        return min((run.start.at_ns for run in self.runs), default=0)

    @property
    def first_token_ns(self) -> int:
        """The time at which its first token was sent."""
        return min((run.computed.sent_ns for run in self.runs), default=0)
