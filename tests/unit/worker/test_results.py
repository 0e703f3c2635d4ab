"""Results on their way: each arrives, in order, however often the bus is away between sending and answering."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from memory_bus import MemoryBus
from memory_connections import MemoryConnection

from servicekit.bus import BusFull, BusUnavailable
from servicekit.bus.calls import Call, Read, ReadPromptOutput, Submit
from servicekit.bus.keys import PAYLOAD
from worker_svc import results
from worker_svc.results import ResultStream


class FlakyBus(MemoryBus):
    """Whose connections fail as they are told: "send" before it was done, "answer" after, "full" instead of it."""

    def __init__(self) -> None:
        super().__init__()
        self.troubles: list[str] = []

    def connect(self) -> MemoryConnection:
        return FlakyConnection(self)


class FlakyConnection(MemoryConnection):
    def __init__(self, bus: FlakyBus) -> None:
        super().__init__(bus)
        self._flaky = bus
        self._refused = False

    def send(self, calls: Sequence[Call[Any]]) -> None:
        trouble = self._flaky.troubles.pop(0) if self._flaky.troubles else ""
        if trouble == "send":
            raise BusUnavailable(trouble)
        if trouble == "full":
            self._refused = True
            return
        super().send(calls)
        if trouble == "answer":
            self._bus.stop()
            self._bus.start()

    def receive(self) -> list[Any]:
        refused, self._refused = self._refused, False
        if refused:
            raise BusFull("full")
        return super().receive()


def appended(bus: MemoryBus) -> list[bytes]:
    stream = bus.keys.results("w")
    entries = MemoryConnection(bus).call(Read({stream: b"0-0"})).get(stream, [])
    return [entry.fields[PAYLOAD] for entry in entries]


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> FlakyBus:
    monkeypatch.setattr(results, "_PAUSE_S", 0.001)
    return FlakyBus()


def test_results_arrive_in_order(bus: FlakyBus) -> None:
    stream = ResultStream(bus, "w", b"m" * 8, threading.Event())
    for number in range(5):
        stream.append(b"%d" % number)
    stream.settle()
    assert appended(bus) == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("trouble", ["send", "answer", "full"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_result_that_was_not_answered_is_sent_again_before_the_next(bus: FlakyBus, trouble: str, which: int) -> None:
    stream = ResultStream(bus, "w", b"m" * 8, threading.Event())
    bus.troubles = [""] * which + [trouble]
    for number in range(3):
        stream.append(b"%d" % number)
    stream.settle()
    found = appended(bus)
    # A result may be there twice; in a bus that lost what it had, only what came afterwards is there.
    assert [each for index, each in enumerate(found) if each not in found[:index]] == sorted(set(found))
    assert set(found) >= {b"%d" % number for number in range(which, 3)}


def test_once_stopped_what_cannot_be_appended_is_given_up(bus: FlakyBus) -> None:
    stop = threading.Event()
    stop.set()
    stream = ResultStream(bus, "w", b"m" * 8, stop)
    bus.troubles = ["send"]
    stream.append(b"0")
    stream.settle()
    assert appended(bus) == []


def test_nothing_to_settle_needs_no_bus(bus: FlakyBus) -> None:
    bus.stop()
    ResultStream(bus, "w", b"m" * 8, threading.Event()).settle()


@pytest.mark.parametrize("trouble", ["send", "answer", "full"])
def test_logprobs_of_a_prompt_are_there_before_the_result_that_follows(bus: FlakyBus, trouble: str) -> None:
    submit = Submit(b"r" * 16, "", b"h", b"b", b"d", b"g" * 16, 0)
    MemoryConnection(bus).call(submit)
    stream = ResultStream(bus, "w", b"m" * 8, threading.Event())
    stream.append(b"0")
    bus.troubles = [trouble]
    stream.keep({b"r" * 16: b"logprobs", b"s" * 16: b"of nobody"})
    assert appended(bus) == [b"0"]
    assert MemoryConnection(bus).call(ReadPromptOutput(b"r" * 16, b"m" * 8)) == b"logprobs"
    stream.append(b"1")
    stream.settle()
    assert list(dict.fromkeys(appended(bus))) == [b"0", b"1"]  # one may be there twice
