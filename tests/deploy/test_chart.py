"""The chart's values: what helm takes and refuses of them, and the objects that belong to no pod."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kube import CHART, EXAMPLES, HUB, RELEASE, ROOT, example, needs, of_kind, pods, refusal, render, settings


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_helm_lint_has_nothing_to_say(path: Path) -> None:
    command = [needs("helm"), "lint", "--strict", str(CHART), "--values", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


UNKNOWN: list[dict[str, Any]] = [
    {"gatway": {}},
    {"gateway__replica": 2},
    {"gateway__settings__max-stream": 2},
    {"gateway__settings__redis-url": "redis://x"},
    {"gateway__keda__targets__streams": 2},
    {"workers__main__gpu": 2},
    {"worker__kernelCache__claim": "x"},
    {"defaults__probes__ready": {}},
    {"valkey__sentinel__replicas": 5},
    {"model__hub__name": "x"},
    {"networkPolicy__ingress": []},
    {"settings__log-level": "loud"},
    {"scheduler__settings__policy": "fair"},
    {"gateway__image__digest": "sha256:short"},
]


@pytest.mark.parametrize("values", UNKNOWN, ids=lambda values: next(iter(values)))
def test_unknown_keys_and_values_are_refused(values: dict[str, Any]) -> None:
    assert "don't meet the specifications of the schema" in refusal(*HUB, *settings(**values))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"workers__main__replicas": 0}, "model.servedNames must name the model"),
        ({"worker__keda": {"enabled": True, "minReplicas": 0}}, "model.servedNames must name the model"),
        ({"workers": {"main": None}}, "model.servedNames must name the model"),
        ({"gateway__keda__enabled": True, "gateway__autoscaling__enabled": True}, "enable one of them"),
        ({"scheduler__keda__enabled": True}, "scheduler.keda has no trigger"),
        ({"gateway__keda": {"enabled": True, "targets": {"prompts_lag": 3}}}, "a gateway has no such target"),
        ({"model__path": "/models/x"}, "exactly one of"),
        ({"redis__url": "redis://x"}, "set valkey.enabled to false"),
        ({"valkey__enabled": False}, "redis.url or redis.urlSecret must say where the server is"),
        ({"valkey__tls__enabled": True}, "name the Secret with tls.crt, tls.key and ca.crt"),
        (
            {"valkey": {"enabled": False, "tls": {"enabled": True}}, "redis__url": "redis://x"},
            "TLS of an external one is said by redis.url",
        ),
        (
            {"scheduler__podMonitor__enabled": True, "scheduler__serviceMonitor__enabled": True},
            "scheduler: podMonitor and serviceMonitor are both enabled",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(values: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(*HUB, *settings(**values))


def test_false_and_zero_of_a_component_win_over_the_defaults() -> None:
    objects = render(
        *HUB, *settings(gateway__pdb__enabled=False, gateway__preStopSleepSeconds=0, tokenizer__replicas=0)
    )
    assert f"{RELEASE}-penstock-gateway" not in {
        each["metadata"]["name"] for each in of_kind(objects, "PodDisruptionBudget")
    }
    by_component = {each.component: each for each in pods(objects)}
    assert "lifecycle" not in by_component["gateway"].container
    assert by_component["tokenizer"].owner["spec"]["replicas"] == 0


def test_routes_buffer_nothing_and_wait_for_streams() -> None:
    (ingress,) = of_kind(render(*example("one-gpu")), "Ingress")
    annotations = ingress["metadata"]["annotations"]
    assert annotations["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    assert int(annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"]) >= 3600
    objects = render(*example("eight-gpus"))
    (http,) = of_kind(objects, "HTTPRoute")
    assert http["spec"]["rules"][0]["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    (service,) = (each for each in of_kind(objects, "Service") if each["spec"].get("type") == "ClusterIP")
    ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    (grpc,) = of_kind(objects, "GRPCRoute")
    for route, port in ((http, "http"), (grpc, "grpc")):
        assert route["spec"]["rules"][0]["backendRefs"] == [{"name": service["metadata"]["name"], "port": ports[port]}]


def test_further_objects_are_templates() -> None:
    further = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}}]
    names = {each["metadata"]["name"] for each in of_kind(render(*HUB, *settings(extraObjects=further)), "ConfigMap")}
    assert f"{RELEASE}-more" in names


def test_schema_and_reference_are_made_of_the_values_as_they_are() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.helm_values", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_service_may_send_its_clients_to_the_gateways_of_another_release() -> None:
    def clients_go_to(*arguments: str) -> list[str]:
        (service,) = (
            each for each in of_kind(render(*HUB, *arguments), "Service") if each["metadata"]["name"] == "llm-penstock"
        )
        selector = service["spec"]["selector"].items()
        there = (pod for release in ("llm", "llm-next") for pod in pods(render(*HUB, release=release)))
        return [pod.name for pod in there if selector <= pod.labels.items()]

    assert clients_go_to() == ["llm-penstock-gateway"]
    assert clients_go_to(*settings(service__release="llm-next")) == ["llm-next-penstock-gateway"]
