"""Only the arrows of the architecture: who may connect to whom, as the rendered policies say."""

import pytest
from kube import HUB, Object, Pod, example, of_kind, pods, render, settings
from policies import allows, outside_rules

SERVICES = ("gateway", "tokenizer", "scheduler", "detokenizer", "worker")
PORTS = (8000, 50051, 9100, 8081, 29500, 6379, 26379, 22)


def arrows(objects: tuple[Object, ...]) -> set[tuple[str, str, int]]:
    """Every connection between components that is let through."""
    policies = of_kind(objects, "NetworkPolicy")
    return {
        (source.component, target.component, port)
        for source in pods(objects)
        for target in pods(objects)
        for port in PORTS
        if allows(policies, source, target, port)
    }


def outside(objects: tuple[Object, ...], component: str, direction: str) -> dict[str, list[Object | None]]:
    """Ports that are open to the world, and to which part of it."""
    found: dict[str, list[Object | None]] = {}
    pod = next(each for each in pods(objects) if each.component == component)
    for port, peer in outside_rules(of_kind(objects, "NetworkPolicy"), pod, direction):
        found.setdefault(port, []).append(peer)
    return found


def test_everybody_reaches_valkey_and_gateways_tokenizers_and_nobody_anybody_else() -> None:
    objects = render(*example("several-tenants"))
    to_valkey = {(each, "valkey", 6379) for each in (*SERVICES, "valkey", "sentinel")}
    to_sentinels = {(each, "sentinel", 26379) for each in (*SERVICES, "valkey", "sentinel")}
    to_gateways: set[tuple[str, str, int]] = set()  # clients are named there
    to_tokenizers = {("gateway", "tokenizer", 50051)}  # for calls that need a vocabulary alone
    assert arrows(objects) == to_valkey | to_sentinels | to_gateways | to_tokenizers


def test_ranks_of_a_worker_reach_each_other_at_every_port() -> None:
    found = {
        (source, target, port) for source, target, port in arrows(render(*example("two-nodes"))) if target == "worker"
    }
    assert found == {("worker", "worker", port) for port in PORTS}


def test_gateways_are_open_to_their_clients_alone() -> None:
    everybody = outside(render(*HUB), "gateway", "ingress")
    assert set(everybody) == {"http", "grpc", "metrics"}
    assert everybody["http"] == everybody["grpc"] == [None]
    named = outside(render(*example("several-tenants")), "gateway", "ingress")
    assert named["http"] == named["grpc"]
    assert [each["namespaceSelector"]["matchLabels"]["team"] for each in named["http"] if each] == [
        "research",
        "production",
    ]


@pytest.mark.parametrize("component", ["tokenizer", "scheduler", "detokenizer", "worker"])
def test_other_services_are_open_to_prometheus_and_to_operators_who_are_named(component: str) -> None:
    closed = outside(render(*HUB), component, "ingress")
    assert set(closed) == {"metrics"}
    assert closed["metrics"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    opened = outside(render(*example("several-tenants")), component, "ingress")
    assert opened["grpc"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "operations"}}}]


def test_the_hub_is_for_those_who_load_the_model_from_it() -> None:
    anywhere = [{"ipBlock": {"cidr": "0.0.0.0/0"}}, {"ipBlock": {"cidr": "::/0"}}]
    from_hub, from_volume = render(*HUB), render(*example("one-gpu"))
    for component in SERVICES:
        assert set(outside(from_volume, component, "egress")) == {"53"}
        if component in ("gateway", "scheduler"):
            assert set(outside(from_hub, component, "egress")) == {"53"}
        else:
            assert outside(from_hub, component, "egress")["443"] == anywhere


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("http://collector:4317", "4317"), ("https://collector:443/", "443"), ("http://collector", "4317")],
)
def test_a_collector_of_traces_is_for_detokenizers_that_tell_it(endpoint: str, port: str) -> None:
    where = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "tracing"}}}]
    tells = settings(detokenizer__settings={"otlp-traces-endpoint": endpoint}, networkPolicy__traces=where)
    objects = render(*example("one-gpu"), *tells)
    assert outside(objects, "detokenizer", "egress")[port] == where
    assert port not in outside(objects, "gateway", "egress")


def test_an_external_server_is_reached_where_it_is_said_to_be() -> None:
    objects = render(*example("external-redis"))
    for component in SERVICES:
        assert outside(objects, component, "egress")["6380"] == [{"ipBlock": {"cidr": "10.20.0.0/16"}}]


def test_keda_reaches_what_it_asks() -> None:
    keda = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}
    assert not outside(render(*HUB), "valkey", "ingress")
    objects = render(*example("eight-gpus"))
    assert outside(objects, "valkey", "ingress") == {"valkey": [keda]}
    assert outside(objects, "sentinel", "ingress") == {"sentinel": [keda]}
    straight = render(*HUB, *settings(worker__keda={"enabled": True}, keda__source="metrics-api"))
    assert keda in outside(straight, "gateway", "ingress")["metrics"]


def test_without_a_rule_nothing_passes() -> None:
    """The reader itself: a pod that no policy allows anything is cut off."""
    objects = render(*HUB)
    gateway, scheduler = (
        next(each for each in pods(objects) if each.component == name) for name in ("gateway", "scheduler")
    )
    denial = [each for each in of_kind(objects, "NetworkPolicy") if each["metadata"]["name"].endswith("-deny")]
    assert len(denial) == 1
    assert not allows(denial, scheduler, gateway, 8000)
    assert isinstance(gateway, Pod)
