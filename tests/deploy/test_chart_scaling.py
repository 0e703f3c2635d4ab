"""The number of pods: scalers, and what they ask."""

import re
from urllib.parse import urlsplit

from kube import HUB, NAMESPACE, RELEASE, ROOT, example, of_kind, pods, render, settings
from rendered import triggers

from servicekit.bus.keys import TOKENIZERS, Keys


def test_workers_follow_what_waits_and_not_a_stream() -> None:
    found = triggers(render(*example("one-gpu")), "worker")
    assert set(found) == {"waiting-requests", "expected-wait-seconds", "kv-use", "preemptions-per-second"}
    query = found["waiting-requests"]["metadata"]["query"]
    assert query == f'max(penstock_waiting_requests{{namespace="{NAMESPACE}",app_kubernetes_io_instance="{RELEASE}"}})'
    for each in found.values():
        assert each["type"] == "prometheus"
        assert each["metadata"]["activationThreshold"] == "0"


def test_scalers_ask_for_metrics_that_there_are() -> None:
    documented = set(re.findall(r"`(penstock_\w+)`", (ROOT / "docs" / "metrics.md").read_text("utf-8")))
    objects = render(*example("eight-gpus"), *settings(worker__keda={"enabled": True}))
    queries = [
        trigger["metadata"]["query"]
        for scaled in of_kind(objects, "ScaledObject")
        for trigger in scaled["spec"]["triggers"]
        if trigger["type"] == "prometheus"
    ]
    asked = {name for query in queries for name in re.findall(r"(penstock_\w+)\{", query)}
    assert len(asked) == 6
    assert asked <= documented


def test_without_a_prometheus_any_gateway_is_asked() -> None:
    values = settings(worker__keda={"enabled": True}, keda__source="metrics-api")
    objects = render(*HUB, *values)
    found = triggers(objects, "worker")
    assert {name: each["metadata"]["valueLocation"] for name, each in found.items()} == {
        "waiting-requests": "penstock_waiting_requests",
        "expected-wait-seconds": "penstock_expected_wait_seconds",
    }
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "Service")}
    for each in found.values():
        told = each["metadata"]
        assert told["format"] == "prometheus"
        assert not {name for name in told if name.startswith("aggreg")}, "every gateway tells the pool's value"
        url = urlsplit(told["url"])
        assert (url.scheme, url.path) == ("http", "/metrics")
        name, namespace = str(url.hostname).split(".")[:2]
        assert namespace == NAMESPACE
        assert url.port in {port["port"] for port in services[name]["ports"]}
    encrypted = triggers(render(*HUB, *values, *settings(tls__existingSecret="certificate")), "worker")
    for each in encrypted.values():
        assert each["metadata"]["url"].startswith("https://")
        assert each["metadata"]["unsafeSsl"] == "true", "the certificate is for the names that clients use"


def test_tokenizers_follow_the_lag_of_prompts() -> None:
    own = triggers(render(*example("eight-gpus")), "tokenizer")["prompts-lag"]
    assert own["type"] == "redis-sentinel-streams"
    assert own["metadata"]["stream"] == Keys("penstock").prompts.decode()
    assert own["metadata"]["consumerGroup"] == TOKENIZERS.decode()
    external = triggers(render(*example("external-redis")), "tokenizer")["prompts-lag"]
    assert external["type"] == "redis-streams"
    assert external["metadata"]["address"] == "redis.example.com:6380"
    assert external["metadata"]["enableTLS"] == "true"
    assert external["authenticationRef"] == {"name": "redis-penstock"}


def test_the_number_of_pods_is_the_scalers() -> None:
    for name in ("gateway", "tokenizer", "detokenizer"):
        (pod,) = (each for each in pods(render(*example("eight-gpus"))) if each.component == name)
        assert "replicas" not in pod.owner["spec"]
    objects = render(*HUB, *settings(gateway__autoscaling={"enabled": True, "maxReplicas": 9}))
    (scaler,) = of_kind(objects, "HorizontalPodAutoscaler")
    assert scaler["spec"]["maxReplicas"] == 9
    assert all("replicas" not in each.owner["spec"] for each in pods(objects) if each.component == "gateway")
