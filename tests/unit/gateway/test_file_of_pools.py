"""The file of pools, changed while a gateway runs."""

from typing import Any

import httpx
import pytest
from pool_sites import LIMIT_S, Listener, Site, ask, gateways_of, served, silent, text_of, up
from running_gateway import RunningGateway, eventually

from contract.domain.errors import ErrorCode, PenstockError
from gateway_svc.service import GatewayService
from gateway_svc.settings import GatewaySettings


@pytest.fixture
def gateway(site: Site) -> RunningGateway:
    return site.start_two()


def test_a_pool_is_joined_and_left_while_the_gateway_runs(gateway: RunningGateway, site: Site) -> None:
    site.pipelines["two"].script = silent
    listener = Listener(gateway, "blue")
    (request,) = site.pipelines["two"].wait_for(1)
    request.send(request.row("a"))
    site.add("three", "/models/green")
    site.write("three", "one")
    site.wait_for(gateway, "green", "red")
    assert text_of(ask(gateway, "green")) == "three"
    assert text_of(ask(gateway, "")) == "three", "the first is the first of the file"
    assert ask(gateway, "blue").status_code == 404
    assert gateways_of(site, "two") == 1, "its stream goes on"
    assert httpx.get(f"{gateway.url}/v1/requests/two-{request.request_id.hex()}", timeout=300).status_code == 200
    request.send(request.row("b", finish=1))
    assert listener.end() == "ab"
    eventually(lambda: gateways_of(site, "two") == 0, LIMIT_S)
    eventually(lambda: up(gateway) == {"three": 1.0, "one": 1.0}, LIMIT_S)
    assert httpx.get(f"{gateway.url}/v1/requests/two-{request.request_id.hex()}", timeout=300).status_code == 404
    site.pipelines["two"].script = lambda request: request.say("back")
    site.write()
    site.wait_for(gateway, "red", "blue", "green")
    assert text_of(ask(gateway, "blue")) == "back"


def test_a_pool_that_is_put_back_before_it_has_left_stays(gateway: RunningGateway, site: Site) -> None:
    site.pipelines["two"].script = silent
    listener = Listener(gateway, "blue")
    (request,) = site.pipelines["two"].wait_for(1)
    pool = gateway.service.pools.called("two")
    site.write("one")
    site.wait_for(gateway, "red")
    site.write("one", "two")
    site.wait_for(gateway, "red", "blue")
    request.send(request.row("a", finish=1))
    assert listener.end() == "a"
    site.pipelines["two"].script = lambda request: request.say("two")
    assert text_of(ask(gateway, "blue")) == "two"
    assert gateway.service.pools.called("two") is pool
    assert up(gateway) == {"one": 1.0, "two": 1.0}


def test_names_of_models_may_change_while_the_pool_goes_on(gateway: RunningGateway, site: Site) -> None:
    pool = gateway.service.pools.called("two")
    site.entries[1]["models"] = ["azul", "red"]
    site.write()
    site.wait_for(gateway, "azul", "red")
    assert text_of(ask(gateway, "azul")) == text_of(ask(gateway, "red")) == "two"
    assert text_of(ask(gateway, "")) == "one"
    assert gateway.service.pools.called("two") is pool


@pytest.mark.parametrize(
    "content",
    [
        "",
        "nonsense",
        '{"name": "two", "redis_url": "redis://elsewhere"}',
        '{"name": "x", "redis_url": "ftp://h"}',
        None,
    ],
)
def test_a_version_of_the_file_that_is_wrong_changes_nothing(
    gateway: RunningGateway, site: Site, content: str | None
) -> None:
    if content is None:
        site.file.unlink()
    else:
        site.replace_file(content)
    stats = gateway.service.stats
    eventually(lambda: stats.num_broken_pool_reloads == 1, LIMIT_S)
    assert [text_of(ask(gateway, model)) for model in ("red", "blue")] == ["one", "two"]
    site.write("two")
    site.wait_for(gateway, "blue")
    assert (stats.num_broken_pool_reloads, stats.num_pool_reloads) == (1, 2)


def test_a_model_of_two_pools_is_told_once_and_served_by_the_first(
    gateway: RunningGateway, site: Site, log: Any
) -> None:
    site.add("three", "/models/red")
    site.write()
    eventually(lambda: "several pools have a model" in log.getvalue(), LIMIT_S)
    assert served(gateway) == ["red", "blue"]
    assert text_of(ask(gateway, "red")) == "one"
    site.write("three", "two", "one")
    eventually(lambda: text_of(ask(gateway, "red")) == "three", LIMIT_S)


def test_what_cannot_be_at_the_start_is_refused(site: Site) -> None:
    site.add("one", "/models/red")
    for content, said in (("", "it has no pool"), ('{"name": "x", "redis_url": "ftp://h"}', "the pool x cannot")):
        site.file.write_text(content)
        with pytest.raises(PenstockError, match=said) as caught:
            GatewayService(GatewaySettings(pools=site.file))
        assert caught.value.code is ErrorCode.INTERNAL
    site.write()
    with pytest.raises(PenstockError, match="give each pool of the file its `models`"):
        GatewayService(GatewaySettings(pools=site.file, served_model_name=("a",)))
    with pytest.raises(PenstockError, match="No such file"):
        GatewayService(GatewaySettings(pools=site.folder / "none"))
