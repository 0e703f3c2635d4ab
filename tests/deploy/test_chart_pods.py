"""The pods that the chart makes: what they run, mount, may and are told."""

import pytest
from kube import EXAMPLES, HUB, Object, Pod, example, of_kind, pods, refusal, render, settings
from rendered import SERVICES, started_settings

from servicekit.settings import split_address


@pytest.fixture(params=[path.stem for path in EXAMPLES])
def objects(request: pytest.FixtureRequest) -> tuple[Object, ...]:
    return render(*example(request.param))


@pytest.fixture(params=[path.stem for path in EXAMPLES])
def all_pods(request: pytest.FixtureRequest) -> list[Pod]:
    found = pods(render(*example(request.param)))
    wanted = {*SERVICES} - {"gateway"} if request.param == "pool-alone" else {*SERVICES}
    assert wanted <= {each.component for each in found}
    return found


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


def test_the_hub_token_is_for_those_who_load_the_model() -> None:
    for pod in pods(render(*example("external-redis"))):
        token = [each for each in pod.container["env"] if each["name"] == "HF_TOKEN"]
        if pod.component in ("gateway", "scheduler"):
            assert not token
        else:
            assert token[0]["valueFrom"]["secretKeyRef"] == {"name": "hub-token", "key": "token"}


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
