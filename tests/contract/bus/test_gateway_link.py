"""A gateway's hold on a server that goes silent, or is not the primary any more: new connections, and on it goes."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import structlog
from bus_flow import ask
from faulty_servers import LIMIT_S, Proxy, running

from gateway_svc import link as link_module
from gateway_svc.link import Link
from servicekit.bus import BusUnavailable, open_bus
from servicekit.bus.calls import Append, Read
from servicekit.pool_stats import Loss, PoolStats


async def _lives_through(proxy: Proxy, trouble: Callable[[], Awaitable[None]]) -> Link:
    """A link that is up, has its trouble, and is up again; with a reader that waits all the time."""
    stats = PoolStats()
    link = Link(open_bus(proxy.url), "g", "", 1.5, stats=stats)
    assert not stats.is_up
    await link.open()
    assert (stats.is_up, stats.losses) == (True, {})
    num_rerouted = 0

    def rerouted() -> None:
        nonlocal num_rerouted
        num_rerouted += 1

    link.rerouted = rerouted
    read: list[bytes] = []

    async def keep_reading() -> None:
        while True:
            await link.wait_connected()
            with contextlib.suppress(BusUnavailable):
                found = await link.read(Read({link.text_stream: b"0-0"}, block_ms=1000))
                read.extend(entry.fields[b"n"] for entries in found.values() for entry in entries)
            await asyncio.sleep(0.05)

    keeper, reader = asyncio.create_task(link.keep(lambda: b"")), asyncio.create_task(keep_reading())
    await trouble()
    async with asyncio.timeout(LIMIT_S):
        while not (num_rerouted and link.connected):
            await asyncio.sleep(0.02)
        while b"after" not in read:
            with contextlib.suppress(BusUnavailable):
                await link.call(Append(link.text_stream, {b"n": b"after"}))
            await asyncio.sleep(0.05)
    assert stats.is_up
    assert stats.losses[Loss.UNREACHABLE] >= 1
    for task in (keeper, reader):
        task.cancel()
    await asyncio.gather(keeper, reader, return_exceptions=True)
    return link


def test_a_gateway_leaves_connections_that_are_half_open(valkey_tcp_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        proxy = Proxy(valkey_tcp_port)

        async def trouble() -> None:
            proxy.go_silent()
            async with asyncio.timeout(LIMIT_S):
                while proxy.num_connections < 4:
                    await asyncio.sleep(0.02)
            # The new ones are not left as well if the server stands still for a while.
            monkeypatch.setattr(link_module, "ANSWER_S", LIMIT_S)

        link = await _lives_through(proxy, trouble)
        assert proxy.num_connections == 4, "the two at first, and the two made anew"
        await link.close()
        proxy.close()

    asyncio.run(test())


def test_a_gateway_leaves_a_primary_that_was_demoted(tmp_path: Path, redis_program: Path) -> None:
    with running(tmp_path / "one", program=redis_program) as first, running(tmp_path / "two") as second:

        async def test() -> None:
            proxy = Proxy(first)

            async def trouble() -> None:
                proxy.target_port = second
                ask(f"redis://127.0.0.1:{first}", "REPLICAOF", "127.0.0.1", "1")

            link = await _lives_through(proxy, trouble)
            assert ask(f"redis://127.0.0.1:{second}", "EXISTS", link.text_stream.decode()) == "1"
            await link.close()
            proxy.close()

        asyncio.run(test())


def test_a_call_that_outlives_its_connection_does_not_end_the_next_one(valkey_tcp_port: int) -> None:
    async def test() -> None:
        link = Link(open_bus(f"redis://127.0.0.1:{valkey_tcp_port}"), "g", "", 1.5)
        await link.open()
        link._lose(BusUnavailable("the server"), link._num_losses)
        assert not link.connected
        link._lost.clear()
        link._up.set()
        with structlog.testing.capture_logs() as logs:
            link._lose(BusUnavailable("a call from before"), link._num_losses - 1)
        assert link.connected
        assert not logs
        await link.close()

    asyncio.run(test())


@pytest.fixture(scope="module")
def valkey_tcp_port(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    with running(tmp_path_factory.mktemp("valkey") / "data") as port:
        yield port
