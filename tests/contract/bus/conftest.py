"""The pools under test: in memory, on Valkey, and on Redis 7 where it is installed."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from bus_flow import Flow, seem_restarted, seem_settled, write_everything
from memory_bus import MemoryBus
from restartable import Restartable

from servicekit.bus import Bus, open_bus
from servicekit.bus.embedded import EmbeddedServer, find_server
from servicekit.bus.keys import SETTLE_MS

_pools = count(1)


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedServer(tmp_path_factory.mktemp("valkey"), server=find_server())
    server.start()
    yield server.url
    server.close()


@pytest.fixture(scope="session")
def redis_program() -> Path:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server on PATH: install Debian's redis-server to test with it")
    return Path(program)


@pytest.fixture(scope="session")
def redis_url(redis_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedServer(tmp_path_factory.mktemp("redis"), server=redis_program, port=0)
    server.start()
    yield server.url
    server.close()


@pytest.fixture
def pool() -> str:
    return f"pool-{next(_pools)}"


@pytest.fixture(params=["memory", "valkey", "redis"])
def bus(request: pytest.FixtureRequest, pool: str) -> Bus:
    if request.param == "memory":
        return MemoryBus(pool)
    return open_bus(request.getfixturevalue(f"{request.param}_url"), pool)


@pytest.fixture
def flow(bus: Bus) -> Iterator[Flow]:
    connection = bus.connect()
    yield Flow(bus, connection)
    connection.close()


@dataclass
class Outage:
    """A bus whose server can be killed and started again."""

    bus: Bus
    kill: Callable[[], None]
    start: Callable[[], None]


@pytest.fixture(params=["memory", "valkey", "redis"])
def outage(request: pytest.FixtureRequest, pool: str, tmp_path: Path) -> Iterator[Outage]:
    if request.param == "memory":
        memory_bus = MemoryBus(pool)
        yield Outage(memory_bus, memory_bus.stop, memory_bus.start)
        return
    program = find_server() if request.param == "valkey" else request.getfixturevalue("redis_program")
    server = EmbeddedServer(tmp_path / "data", server=program, port=0 if request.param == "redis" else None)
    server.start()

    def kill() -> None:
        assert server.pid is not None
        write_everything(server.url)
        os.kill(server.pid, signal.SIGKILL)
        while server.exit_code() is None:
            time.sleep(0.005)

    yield Outage(open_bus(server.url, pool), kill, server.start)
    server.close()


@pytest.fixture(params=["memory", "valkey", "redis"])
def pool_of(request: pytest.FixtureRequest, pool: str) -> Iterator[Restartable]:
    if request.param == "memory":
        offset_ms = 0

        def wait() -> None:
            nonlocal offset_ms
            offset_ms += SETTLE_MS

        memory = MemoryBus(pool, lambda: 1_700_000_000_000 + offset_ms)
        connection = memory.connect()

        def restart() -> None:
            memory.stop()
            memory.start()
            connection.reconnect()

        yield Restartable(Flow(memory, connection), restart, wait)
        return
    url: str = request.getfixturevalue(f"{request.param}_url")
    bus = open_bus(url, pool)
    flow = Flow(bus, bus.connect())
    yield Restartable(flow, lambda: seem_restarted(url, bus.keys), lambda: seem_settled(url, bus.keys))
    flow.connection.close()
