"""Several pools behind the gateways of one release, as helm renders them."""

from typing import Any

import pytest
from kube import HUB, NAMESPACE, Object, example, of_kind, pods, refusal, render, settings
from policies import selects

from gateway_svc.core.pool_entries import PoolEntry, parse_pools

URL = "redis://code.example.com:6390/0"
TWO = settings(pools=[{"name": "chat"}, {"name": "code", "url": URL}], model__servedNames=["chat"])


def file_of(objects: tuple[Object, ...]) -> tuple[PoolEntry, ...]:
    """The file of pools, as a gateway reads it."""
    (found,) = (each for each in of_kind(objects, "ConfigMap") if each["metadata"]["name"].endswith("-pools"))
    return parse_pools(found["data"]["pools.jsonl"].encode())


def gateway(objects: tuple[Object, ...]) -> Any:
    (found,) = (each for each in pods(objects) if each.component == "gateway")
    return found


def test_gateways_read_the_pools_of_the_values() -> None:
    objects = render(*HUB, *TWO)
    assert file_of(objects) == (
        PoolEntry("chat", pool="penstock", models=("chat",)),
        PoolEntry("code", pool="penstock", redis_url=URL, num_shards=4),
    )
    pod = gateway(objects)
    assert "--pools=/etc/penstock/pools/pools.jsonl" in pod.container["args"]
    assert not any("served-model-name" in each for each in pod.container["args"]), "the file says it"
    (mount,) = (each for each in pod.container["volumeMounts"] if each["name"] == "pools")
    assert (mount["mountPath"], mount.get("subPath")) == ("/etc/penstock/pools", None), (
        "as it changes when the file does"
    )
    others = [each for each in pods(objects) if each.component in ("tokenizer", "worker")]
    assert not any(volume["name"] == "pools" for each in others for volume in each.spec["volumes"])


def test_without_pools_there_is_no_file() -> None:
    objects = render(*HUB)
    assert not any("--pools" in each for each in gateway(objects).container["args"])
    assert not [each for each in of_kind(objects, "ConfigMap") if each["metadata"]["name"].endswith("-pools")]


def test_passwords_of_other_pools_are_mounted_secrets() -> None:
    objects = render(*example("several-pools"))
    own, code = file_of(objects)
    assert own.redis_password_file is None
    path = code.redis_password_file
    assert path == "/etc/penstock/pool-code-password/password"
    pod = gateway(objects)
    (volume,) = (each for each in pod.spec["volumes"] if each["name"] == "pool-code-password")
    assert volume["secret"]["secretName"] == "code-penstock-valkey"
    assert volume["secret"]["items"] == [{"key": "services", "path": "password"}]
    assert {"name": "pool-code-password", "mountPath": path.rpartition("/")[0], "readOnly": True} in pod.container[
        "volumeMounts"
    ]


def test_gateways_alone_reach_the_other_servers() -> None:
    for arguments, port, peers in (
        ((*HUB, *TWO), 6379, [{"ipBlock": {"cidr": "0.0.0.0/0"}}, {"ipBlock": {"cidr": "::/0"}}]),
        (
            example("several-pools"),
            6379,
            [
                {
                    "podSelector": {
                        "matchLabels": {
                            "app.kubernetes.io/instance": "code",
                            "app.kubernetes.io/component": "valkey",
                        }
                    }
                }
            ],
        ),
    ):
        for policy in of_kind(render(*arguments), "NetworkPolicy"):
            kind = policy["metadata"]["labels"].get("app.kubernetes.io/component")
            rules = policy["spec"].get("egress") or []
            open_rules = [each for each in rules if each.get("to") == peers and {"port": port} in each["ports"]]
            assert len(open_rules) == (kind == "gateway"), policy["metadata"]["name"]


def test_a_pool_alone_has_no_gateway_and_lets_those_of_another_release_in() -> None:
    objects = render(*example("pool-alone"))
    assert not [each for each in pods(objects) if each.component == "gateway"]
    assert not [each for each in of_kind(objects, "Service") if "gateway" in each["metadata"]["name"]]
    (policy,) = (
        each
        for each in of_kind(objects, "NetworkPolicy")
        if each["spec"]["podSelector"]["matchLabels"].get("app.kubernetes.io/component") == "valkey"
    )
    other = gateway(render(*example("several-pools"))).labels
    (rule,) = policy["spec"]["ingress"]
    assert any(selects(each["podSelector"], other) for each in rule["from"])
    (scaled,) = of_kind(objects, "ScaledObject")
    queries = [each["metadata"]["query"] for each in scaled["spec"]["triggers"]]
    selector = f'namespace="{NAMESPACE}",app_kubernetes_io_instance="llm",pool="code"'
    assert queries[0] == f"max(penstock_expected_wait_seconds{{{selector}}})"
    assert queries[-1] == f"max(penstock_waiting_requests{{{selector}}})"


def test_workers_are_scaled_by_what_waits_in_their_own_pool() -> None:
    keda = settings(worker__keda={"enabled": True})
    (scaled,) = of_kind(render(*HUB, *TWO, *keda), "ScaledObject")
    queries = {each["name"]: each["metadata"]["query"] for each in scaled["spec"]["triggers"]}
    assert 'pool="chat"' in queries["waiting-requests"]
    assert 'pool="chat"' in queries["expected-wait-seconds"]
    assert "pool=" not in queries["kv-use"], "its schedulers are its own"
    (straight,) = of_kind(render(*HUB, *TWO, *keda, *settings(keda__source="metrics-api")), "ScaledObject")
    places = {each["metadata"]["valueLocation"] for each in straight["spec"]["triggers"]}
    assert places == {'penstock_waiting_requests{pool="chat"}', 'penstock_expected_wait_seconds{pool="chat"}'}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"pools": [{"name": "a"}, {"name": "b"}]}, "2 have no url"),
        ({"pools": [{"name": "a", "pool": "x"}]}, "is the release's own"),
        ({"pools": [{"url": URL}]}, "name"),
        ({"pools": [{"name": "a", "weight": 1}]}, "weight"),
        ({"pools": [{"name": "a", "url": "redis://:secret@host"}]}, "url"),
        ({"gateway__enabled": False, "pools": [{"name": "a"}]}, "gateway.enabled is false"),
        ({"gateway__enabled": False, "ingress__enabled": True}, "gateway.enabled is false"),
        ({"gateway__enabled": False, "worker__keda": {"enabled": True}}, "keda.gatewaySelector"),
        ({"gateway__settings": {"pools": "/x"}}, "pools"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    assert said in refusal(*HUB, *settings(**values))
