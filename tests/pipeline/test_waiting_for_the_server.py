"""A service that waits for Redis is alive, however long that takes: nobody is to kill it for it."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from in_memory import Pipeline, wait_until
from memory_bus import MemoryBus

from contract.domain.params import SamplingParams
from servicekit.bus import Bus, open_bus
from servicekit.bus.calls import ListWorkers
from servicekit.bus.embedded import EmbeddedServer

WORKER = {"runner": "simulated", "step_ms": 1.0, "block_size": 4, "num_blocks": 400, "max_num_seqs": 8}
LONG_NS = 2_000_000_000  # longer than any read waits for entries


@contextmanager
def _gone(_: Path) -> Iterator[tuple[Bus, Callable[[], None], Callable[[], None]]]:
    bus = MemoryBus()
    yield bus, bus.stop, bus.start


@contextmanager
def _silent(folder: Path) -> Iterator[tuple[Bus, Callable[[], None], Callable[[], None]]]:
    server = EmbeddedServer(folder / "data")
    server.start()
    assert server.pid is not None
    pid = server.pid
    try:
        yield open_bus(server.url), lambda: os.kill(pid, signal.SIGSTOP), lambda: os.kill(pid, signal.SIGCONT)
    finally:
        os.kill(pid, signal.SIGCONT)
        server.close()


@pytest.mark.parametrize("away", [_gone, _silent], ids=["gone", "silent"])
def test_who_waits_for_the_server_makes_progress(checkpoint: Path, tmp_path: Path, away: Callable[..., object]) -> None:
    with away(tmp_path) as (bus, leave, come_back), Pipeline(checkpoint, bus=bus, worker=WORKER) as pipeline:  # type: ignore[attr-defined]
        leave()
        left_ns = time.monotonic_ns()
        for each in pipeline.running:
            wait_until(lambda service=each.service: service.last_progress_ns() > left_ns + LONG_NS, 300.0)
        come_back()
        # The first hello to another run suspends the worker, which may be slow to notice: then the pool has no model.
        pipeline.wait_ready()
        connection = bus.connect()
        wait_until(lambda: all(worker.alive for worker in connection.call(ListWorkers())))
        connection.close()
        pipeline.wait_ready()
        answer = pipeline.client.complete([1, 2, 3], SamplingParams(temperature=0, max_tokens=3))
        assert len(answer.outputs[0].token_ids) == 3
