"""A scheduler as the worker sees it, played by the test: it pairs, sends plans and reads results."""

import secrets
import time
from collections.abc import Callable

import numpy as np

from contract.v1 import results_pb2, steps_pb2
from servicekit.bus import Bus
from servicekit.bus import keys as k
from servicekit.bus.calls import Commit, Hello, Pair, Pairing, Read, SessionKind

PROMPT = [5, 6, 7, 8, 9]
TIMEOUT_S = 600.0


def column(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def until(condition: Callable[[], bool], seconds: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def tokens(results: list[results_pb2.StepResult]) -> list[int]:
    assert not any(result.HasField("error") for result in results)
    return [int(token) for result in results for token in np.frombuffer(result.token_ids, "<u4")]


class Scheduler:
    """Pairs with the worker and sends plans as a scheduler does."""

    def __init__(self, bus: Bus) -> None:
        self.bus, self.connection, self.sid = bus, bus.connect(), secrets.token_bytes(16)
        self.connection.call(Hello(self.sid, SessionKind.SCHEDULER, "s", "", 60_000))
        self.position = b"0-0"
        self.pairing: Pairing | None = None

    def pair(self, seconds: float = TIMEOUT_S) -> Pairing:
        def paired() -> bool:
            self.pairing = self.connection.call(Pair(self.sid, "w"))
            return self.pairing is not None

        until(paired, seconds)
        assert self.pairing is not None
        self.position = self.pairing.results_after
        return self.pairing

    def pair_with_another_than(self, incarnation: bytes) -> None:
        until(lambda: self.pair().incarnation != incarnation)

    def send(self, step: int, num_tokens: int = 1, admit: bool = False, **changes: bytes) -> None:
        assert self.pairing is not None
        fields = {"slots": column(0), "num_tokens": column(num_tokens), **changes}
        plan = steps_pb2.StepPlan(incarnation=self.pairing.incarnation, step=step, **fields)
        plan.origin.session, plan.origin.sent_unix_ns = self.sid, time.time_ns()
        if admit:
            admission = plan.admissions.add(
                slot=0, token_ids=column(*PROMPT), num_prompt_tokens=len(PROMPT), block_ids=column(*range(8))
            )
            admission.sampling.temperature = 0.0
        assert self.connection.call(Commit(self.sid, worker="w", plan=plan.SerializeToString()))

    def send_raw(self, payload: bytes) -> None:
        assert self.connection.call(Commit(self.sid, worker="w", plan=payload))

    def results(self, count: int, at_once: int = 64) -> list[results_pb2.StepResult]:
        """So many, and no more of those that are read `at_once`."""
        stream, found = self.bus.keys.results("w"), []
        deadline = time.monotonic() + TIMEOUT_S
        while len(found) < count:
            assert time.monotonic() < deadline, f"only {len(found)} of {count} results came"
            for entry in self.connection.call(Read({stream: self.position}, at_once, block_ms=100)).get(stream, []):
                self.position = entry.entry_id
                found.append(results_pb2.StepResult.FromString(entry.fields[k.PAYLOAD]))
        assert len(found) == count
        return found

    def close(self) -> None:
        self.connection.close()
