"""Pools that come, are away or leave, while a gateway serves the others."""

from typing import Any

import httpx
from pool_sites import LIMIT_S, Listener, Site, ask, gateways_of, served, silent, text_of, up
from running_gateway import eventually

from servicekit.bus.calls import Hello, ListWorkers, SessionKind
from servicekit.shape import pool_shape


def test_a_pool_whose_server_is_away_is_503_for_its_models_alone(site: Site) -> None:
    site.add("one", "/models/red")
    site.add("two", "/models/blue")
    site.pipelines["one"].script = silent
    gateway = site.start(outage_patience_s=0.2)
    site.wait_for(gateway, "red", "blue")
    listener = Listener(gateway, "red")
    (request,) = site.pipelines["one"].wait_for(1)
    site.bus("two").stop()
    eventually(lambda: up(gateway) == {"one": 1.0, "two": 0.0}, LIMIT_S)
    refused = ask(gateway, "blue")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "cannot reach its Redis server" in refused.json()["error"]["message"]
    request.send(request.row("a"))
    site.pipelines["one"].script = lambda request: request.say("one")
    assert text_of(ask(gateway, "red")) == "one"
    assert httpx.get(f"{gateway.url}/ready", timeout=300).status_code == 200, "one pool is enough"
    assert httpx.get(f"{gateway.url}/health", timeout=300).status_code == 200
    assert served(gateway) == ["red", "blue"]
    site.bus("one").stop()
    eventually(lambda: httpx.get(f"{gateway.url}/ready", timeout=300).status_code == 503, LIMIT_S)
    for name in ("one", "two"):
        site.bus(name).start()
    eventually(lambda: up(gateway) == {"one": 1.0, "two": 1.0}, LIMIT_S)
    # Its worker goes on a moment later than its server, and the gateway looks once a second.
    eventually(lambda: all(each.alive for each in site.pipelines["two"].call(ListWorkers())), LIMIT_S)
    site.wait_for(gateway, "red", "blue")
    assert text_of(ask(gateway, "blue")) == "two"
    request.send(request.row("b", finish=1))
    assert listener.end() == "ab"


def test_a_gateway_starts_while_a_server_is_away(site: Site) -> None:
    site.add("one", "/models/red")
    site.add("two", "/models/blue")
    site.add("three", "/models/green", entry={"models": ["verde"]})
    site.bus("two").stop()
    site.bus("three").stop()
    gateway = site.start(outage_patience_s=0.2)
    assert text_of(ask(gateway, "red")) == "one"
    for model in ("blue", "verde"):  # it may be there: nobody has told; it is: the file says so
        refused = ask(gateway, model)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert served(gateway) == ["red", "verde"]
    for name in ("two", "three"):
        site.bus(name).start()
    # The file lists a model of the third whether it is back or not.
    eventually(lambda: up(gateway) == {"one": 1.0, "two": 1.0, "three": 1.0}, LIMIT_S)
    site.wait_for(gateway, "red", "blue", "verde")
    eventually(lambda: ask(gateway, "verde").status_code == 200, LIMIT_S)  # as soon as its pool has told its model
    assert [text_of(ask(gateway, model)) for model in ("blue", "verde")] == ["two", "three"]
    assert ask(gateway, "green").status_code == 404, "the file calls it otherwise"


def test_a_gateway_of_several_pools_drains_all_of_them(site: Site) -> None:
    for name, model in (("one", "/models/red"), ("two", "/models/blue")):
        site.add(name, model).script = silent
    gateway = site.start()
    site.wait_for(gateway, "red", "blue")
    listeners = [Listener(gateway, model) for model in ("red", "blue")]
    requests = [pipeline.wait_for(1)[0] for pipeline in site.pipelines.values()]
    gateway.stop.drain()
    for request in requests:
        request.send(request.row("a", finish=1))
    assert [listener.end() for listener in listeners] == ["a", "a"]
    assert gateway.thread is not None
    gateway.thread.join(300)
    assert not gateway.thread.is_alive()
    assert [gateways_of(site, name) for name in ("one", "two")] == [0, 0]


def test_a_server_that_is_not_fit_keeps_only_its_own_pool_away(site: Site, log: Any) -> None:
    site.add("one", "/models/red")
    site.add("two", "/models/blue", entry={"num_shards": 9})
    shape = tuple(pool_shape(4).items())
    site.pipelines["two"].call(Hello(b"s" * 16, SessionKind.DETOKENIZER, "d", "", 600_000, shape=shape))
    gateway = site.start()
    eventually(lambda: "a pool cannot be joined" in log.getvalue(), LIMIT_S)
    assert text_of(ask(gateway, "red")) == "one"
    assert up(gateway) == {"one": 1.0, "two": 0.0}
