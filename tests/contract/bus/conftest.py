"""The pools under test: in memory, on Valkey, and on Redis 7 where it is installed."""

import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from bus_flow import Flow

from servicekit.bus import Bus, MemoryBus, open_bus
from servicekit.bus.embedded import EmbeddedServer, find_server

_pools = count(1)


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedServer(tmp_path_factory.mktemp("valkey"), server=find_server())
    server.start()
    yield server.url
    server.close()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server on PATH: install Debian's redis-server to test with it")
    server = EmbeddedServer(tmp_path_factory.mktemp("redis"), server=Path(program), port=0)
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
