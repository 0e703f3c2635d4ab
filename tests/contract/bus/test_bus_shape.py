"""A pool's services agree on what would otherwise leave requests where nobody looks for them."""

import asyncio

import pytest
from bus_flow import DEAD_MS, LONG_MS, Flow, sid_of

from contract.domain.errors import PenstockError
from gateway_svc.link import Link
from servicekit.bus import Bus
from servicekit.bus.calls import Hello, Leave, SessionKind
from servicekit.session import Session
from servicekit.shape import pool_shape


def hello(number: int, ttl_ms: int = LONG_MS, **shape: str) -> Hello:
    return Hello(sid_of(number), SessionKind.WORKER, f"w{number}", "", ttl_ms, shape=tuple(shape.items()))


def test_who_differs_in_a_part_is_refused_and_told_what_to_do(flow: Flow) -> None:
    flow.connection.call(hello(101, num_shards="4", protocol="1"))
    with pytest.raises(
        PenstockError, match="num_shards is 4, this process's 8: give all services of a pool the same --num-shards"
    ):
        flow.connection.call(hello(102, num_shards="8", protocol="1"))
    with pytest.raises(PenstockError, match="protocol is 1, this process's 2: run one version"):
        flow.connection.call(hello(102, num_shards="4", protocol="2"))
    assert flow.connection.call(hello(102, num_shards="4", protocol="1")).active


def test_a_part_is_agreed_on_by_the_first_that_knows_it(flow: Flow) -> None:
    flow.connection.call(hello(101, num_shards="4"))
    flow.connection.call(hello(102, num_shards="4", vocabulary="a"))
    assert flow.connection.call(hello(103, num_shards="4")).active
    with pytest.raises(
        PenstockError, match="vocabulary is a, this process's b: give all services of a pool the same --model"
    ):
        flow.connection.call(hello(104, num_shards="4", vocabulary="b"))


def test_who_is_refused_leaves_no_trace(flow: Flow) -> None:
    flow.connection.call(hello(101, num_shards="4"))
    with pytest.raises(PenstockError):
        flow.connection.call(hello(102, vocabulary="b", num_shards="8"))
    assert flow.connection.call(hello(103, num_shards="4", vocabulary="a")).active


@pytest.mark.parametrize("how", ["left", "dead"])
def test_a_pool_that_everybody_has_left_may_get_another_shape(flow: Flow, how: str) -> None:
    flow.connection.call(hello(101, LONG_MS if how == "left" else DEAD_MS, num_shards="4", vocabulary="a"))
    if how == "left":
        flow.connection.call(Leave(sid_of(101)))
    assert flow.connection.call(hello(102, num_shards="8")).active
    # All of it is gone, what was not told anew too.
    assert flow.connection.call(hello(103, num_shards="8", vocabulary="b")).active


def test_who_comes_first_to_a_deserted_pool_does_not_hold_others_to_what_was(flow: Flow) -> None:
    flow.connection.call(hello(101, num_shards="4", generation_defaults="a"))
    flow.connection.call(Leave(sid_of(101)))
    assert flow.connection.call(hello(102, num_shards="4")).active
    assert flow.connection.call(hello(103, num_shards="4", generation_defaults="b")).active
    with pytest.raises(PenstockError, match="give all tokenizers of a pool the same --model, --revision and --gen"):
        flow.connection.call(hello(104, num_shards="4", generation_defaults="a"))


def test_requests_that_wait_keep_the_shape(flow: Flow) -> None:
    flow.connection.call(hello(101, DEAD_MS, num_shards="4"))
    flow.submitted()
    with pytest.raises(PenstockError, match="num_shards"):
        flow.connection.call(hello(102, num_shards="8"))


def test_requests_that_a_dead_scheduler_owns_keep_the_shape(flow: Flow) -> None:
    scheduler = flow.session()
    flow.running(scheduler)
    flow.connection.call(hello(101, num_shards="4"))
    for sid in (scheduler, sid_of(101)):
        flow.connection.call(Leave(sid))
    with pytest.raises(PenstockError, match="num_shards"):
        flow.connection.call(hello(102, num_shards="8"))


def test_a_service_that_differs_cannot_start(bus: Bus, flow: Flow) -> None:
    flow.connection.call(hello(101, **pool_shape(4)))
    with pytest.raises(PenstockError, match="num_shards"):
        Session(bus, SessionKind.SCHEDULER, "s", shape=pool_shape(8)).connect()
    asyncio.run(_open_gateway(bus))


async def _open_gateway(bus: Bus) -> None:
    link = Link(bus, "g", "", 1.5, shape=pool_shape(8))
    with pytest.raises(PenstockError, match="num_shards"):
        await link.open()
    await link.close()


def test_vocabularies_and_templates_are_told_by_what_is_in_them() -> None:
    first = pool_shape(4, vocabulary={"a": 0, "b": 1}, chat_templates={"default": "x"})
    assert first == pool_shape(4, vocabulary={"b": 1, "a": 0}, chat_templates={"default": "x"})
    swapped = pool_shape(4, vocabulary={"a": 1, "b": 0}, chat_templates={"defaul": "tx"})
    assert first["vocabulary"] != swapped["vocabulary"]
    assert first["chat_template"] != swapped["chat_template"]
    assert pool_shape(4).keys() == {"num_shards", "protocol"}
    warm, hot = (pool_shape(4, generation_defaults={"temperature": each}) for each in (0.6, 0.7))
    assert warm["generation_defaults"] != hot["generation_defaults"]
