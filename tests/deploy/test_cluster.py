"""The chart on a real control plane: admission, Pod Security, roll-outs and disruption budgets are Kubernetes' own."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import rollouts
from kube import CHART, EXAMPLES, LIMIT_S, RELEASE, Cluster, Object, example, settings, started_cluster
from local_pods import wait_until

TIMEOUT = f"--timeout={LIMIT_S}s"
CLAIMS = ("models", "penstock-kernels")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane whose cluster has volumes for claims."""
    with started_cluster(tmp_path_factory.mktemp("cluster") / "plane") as cluster:
        cluster.apply(*(volume(number) for number in range(64)))
        cluster.run("kubectl", "label", "nodes", "--all", "pool=spare")  # which an example asks for
        yield cluster


def volume(number: int) -> Object:
    """A volume that a claim without a storage class is bound to."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"volume-{number}"},
        "spec": {
            "capacity": {"storage": "200Gi"},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": f"/volumes/{number}"},
        },
    }


def make_namespace(cluster: Cluster, name: str) -> None:
    """A namespace that takes only pods of the restricted profile, with the claims that examples name."""
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn", "audit")}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    for claim in CLAIMS:
        resources = {"requests": {"storage": "1Gi"}}
        spec = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "resources": resources}
        metadata = {"name": claim, "namespace": name}
        cluster.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec})


def install(cluster: Cluster, namespace: str, *arguments: str, command: str = "install") -> str:
    warned = cluster.run("helm", command, RELEASE, str(CHART), "--namespace", namespace, "--wait", TIMEOUT, *arguments)
    assert "would violate PodSecurity" not in warned
    return warned


def remaining(cluster: Cluster, namespace: str) -> set[str]:
    """Objects of a namespace that the cluster itself does not make."""
    kinds = cluster.run("kubectl", "api-resources", "--verbs=list", "--namespaced", "-o", "name").split()
    wanted = [each for each in kinds if not each.startswith("events")]
    found = cluster.get(",".join(wanted), "--namespace", namespace)
    return {
        f"{each['kind']}/{each['metadata']['name']}"
        for each in found
        if each["metadata"]["name"] not in ("default", "kube-root-ca.crt", *CLAIMS)
    }


def arguments_of(cluster: Cluster, namespace: str, deployment: str) -> list[str]:
    (found,) = (
        each
        for each in cluster.get("deployments", "--namespace", namespace)
        if each["metadata"]["name"] == f"{RELEASE}-penstock-{deployment}"
    )
    return list(found["spec"]["template"]["spec"]["containers"][0]["args"])


@pytest.mark.parametrize("name", [path.stem for path in EXAMPLES])
def test_every_example_is_installed_where_pods_are_restricted_and_leaves_only_its_claims(
    cluster: Cluster, name: str
) -> None:
    make_namespace(cluster, name)
    install(cluster, name, *example(name))
    pods = cluster.get("pods", "--namespace", name)
    ready = {
        each["metadata"]["labels"]["app.kubernetes.io/component"]
        for each in pods
        if any(
            condition["type"] == "Ready" and condition["status"] == "True" for condition in each["status"]["conditions"]
        )
    }
    # No operator makes pods of a LeaderWorkerSet here; a Deployment that KEDA scales has one until KEDA looks.
    services = {"gateway", "tokenizer", "scheduler", "detokenizer", "worker"}
    assert ready >= services - {"two-nodes": {"worker"}, "pool-alone": {"gateway"}}.get(name, set())
    cluster.run("helm", "uninstall", RELEASE, "--namespace", name, "--wait", TIMEOUT)
    # helm waits for what it made, not for what controllers made of that
    wait_until(
        lambda: {each.split("/")[0] for each in remaining(cluster, name)} <= {"PersistentVolumeClaim"},
        "nothing but claims is left",
    )
    left = remaining(cluster, name)
    servers = {"cpu": 1, "several-pools": 1, "pool-alone": 1, "external-redis": 0}.get(name, 2)
    assert len([each for each in left if "valkey" in each]) == servers


def test_claims_go_with_the_release_where_that_is_asked_for(cluster: Cluster) -> None:
    make_namespace(cluster, "gone")
    install(cluster, "gone", *example("cpu"), *settings(valkey__persistence__deleteOnUninstall=True))
    cluster.run("helm", "uninstall", RELEASE, "--namespace", "gone", "--wait", TIMEOUT)
    cluster.run(
        "kubectl", "wait", "--for=delete", "pvc", "--selector=app.kubernetes.io/component=valkey", "-n", "gone", TIMEOUT
    )
    assert not {each for each in remaining(cluster, "gone") if "Claim" in each}


def test_an_upgrade_is_rolled_out_and_rolled_back_and_passwords_stay(cluster: Cluster) -> None:
    make_namespace(cluster, "upgraded")
    install(cluster, "upgraded", *example("eight-gpus"))

    def passwords() -> Object:
        (secret,) = (
            each
            for each in cluster.get("secrets", "--namespace", "upgraded")
            if each["metadata"]["name"] == f"{RELEASE}-penstock-valkey"
        )
        return dict(secret["data"])

    first = passwords()
    assert set(first) == {"admin", "services", "scaler"}
    more = settings(gateway__settings__max_streams=7, scheduler__replicas=3)
    more = tuple(each.replace("max_streams", "max-streams") for each in more)
    install(cluster, "upgraded", *example("eight-gpus"), *more, command="upgrade")
    assert "--max-streams=7" in arguments_of(cluster, "upgraded", "gateway")
    assert passwords() == first
    shards = settings(numShards=8)
    refused = cluster.run(
        "helm", "upgrade", RELEASE, str(CHART), "-n", "upgraded", *example("eight-gpus"), *shards, status=1
    )
    assert "numShards of the pool penstock is 4 and cannot change" in refused
    tls = settings(valkey__tls={"enabled": True, "existingSecret": "valkey-tls"})
    refused = cluster.run(
        "helm", "upgrade", RELEASE, str(CHART), "-n", "upgraded", *example("eight-gpus"), *tls, status=1
    )
    assert "valkey.tls.enabled cannot change while the release lives" in refused
    cluster.run("helm", "rollback", RELEASE, "1", "--namespace", "upgraded", "--wait", TIMEOUT)
    assert "--max-streams=7" not in arguments_of(cluster, "upgraded", "gateway")
    assert passwords() == first
    cluster.run("helm", "uninstall", RELEASE, "--namespace", "upgraded", "--wait", TIMEOUT)


def test_tls_of_the_own_server_is_there_from_the_installation_on(cluster: Cluster) -> None:
    make_namespace(cluster, "encrypted")
    tls = settings(valkey__tls={"enabled": True, "existingSecret": "valkey-tls", "clientCertificates": True})
    install(cluster, "encrypted", *example("eight-gpus"), *tls)
    upgrade = ("helm", "upgrade", RELEASE, str(CHART), "-n", "encrypted", *example("eight-gpus"))
    assert "valkey.tls.enabled cannot change while the release lives" in cluster.run(*upgrade, status=1)
    cluster.run(*upgrade, *tls, "--wait", TIMEOUT)
    cluster.run("helm", "uninstall", RELEASE, "--namespace", "encrypted", "--wait", TIMEOUT)


def test_a_node_is_drained_one_pod_of_each_kind_at_a_time(cluster: Cluster) -> None:
    make_namespace(cluster, "drained")
    install(cluster, "drained", *example("several-tenants"))
    # Where replacements find no node, a second pod of a kind may not go.
    nodes = [each["metadata"]["name"] for each in cluster.get("nodes")]
    for node in nodes:
        cluster.run("kubectl", "cordon", node)
    for kind in ("gateway", "valkey", "sentinel"):
        selector = f"--selector=app.kubernetes.io/component={kind}"
        first, second, *_ = (
            each["metadata"]["name"] for each in cluster.get("pods", "--namespace", "drained", selector)
        )
        assert "Success" in evict(cluster, first, 0)
        assert "disruption budget" in evict(cluster, second, 1)
    for node in nodes:
        cluster.run("kubectl", "uncordon", node)
    cluster.run(
        "kubectl", "rollout", "status", f"deployment/{RELEASE}-penstock-gateway", "--namespace", "drained", TIMEOUT
    )
    for stateful in ("valkey", "sentinel"):
        cluster.run(
            "kubectl",
            "rollout",
            "status",
            f"statefulset/{RELEASE}-penstock-{stateful}",
            "--namespace",
            "drained",
            TIMEOUT,
        )
    # A StatefulSet's pod has its predecessor's name. Here pods are gone the moment they are deleted, so that the
    # disruption controller may never see one end, and counts the new one as disrupted for its limit of two minutes.
    drained = f"--timeout={5 * LIMIT_S}s"
    cluster.run("kubectl", "drain", nodes[0], "--delete-emptydir-data", "--ignore-daemonsets", drained)
    assert not [
        each for each in cluster.get("pods", "--namespace", "drained") if each["spec"].get("nodeName") == nodes[0]
    ]
    cluster.run("kubectl", "uncordon", nodes[0])
    cluster.run("helm", "uninstall", RELEASE, "--namespace", "drained", "--wait", TIMEOUT)


def test_every_pod_that_serves_is_an_endpoint_of_what_a_service_monitor_selects(cluster: Cluster) -> None:
    make_namespace(cluster, "monitored")
    install(cluster, "monitored", *example("cpu"), *settings(defaults__serviceMonitor={"enabled": True}))
    monitors = cluster.get("servicemonitors", "--namespace", "monitored")
    assert len(monitors) == 5
    for monitor in monitors:
        selected = ",".join(f"{name}={value}" for name, value in monitor["spec"]["selector"]["matchLabels"].items())
        (service,) = cluster.get("services", "--namespace", "monitored", f"--selector={selected}")
        (pod,) = cluster.get("pods", "--namespace", "monitored", f"--selector={selected}")
        name = service["metadata"]["name"]
        cluster.run(
            "kubectl",
            "wait",
            "--for=jsonpath={.endpoints[0].conditions.ready}=true",
            "endpointslices",
            f"--selector=kubernetes.io/service-name={name}",
            "--namespace=monitored",
            TIMEOUT,
        )
        (found,) = cluster.get(
            "endpointslices", "--namespace", "monitored", f"--selector=kubernetes.io/service-name={name}"
        )
        assert [each["targetRef"]["name"] for each in found["endpoints"]] == [pod["metadata"]["name"]]
        assert [(each["name"], each["port"]) for each in found["ports"]] == [("metrics", 9100)]
    cluster.run("helm", "uninstall", RELEASE, "--namespace", "monitored", "--wait", TIMEOUT)


def test_controllers_replace_pods_in_the_order_that_is_recorded(cluster: Cluster, tmp_path: Path) -> None:
    """The processes of test_pods_run.py follow it; RECORD_ROLLOUT=1 replaces it."""
    make_namespace(cluster, "replaced")
    install(cluster, "replaced", *rollouts.VALUES)
    before = uids(cluster, "replaced")
    output = tmp_path / "watch"

    def events() -> list[tuple[str, Object]]:
        return list(rollouts.watch_events(output.read_text("utf-8")))

    with cluster.watch_pods("replaced", output):
        wait_until(lambda: rollouts.ready_pods(events()) == before, "the watch has begun")
        images = settings(imageRegistry="registry.example.com")
        install(cluster, "replaced", *rollouts.VALUES, *images, command="upgrade")
        wait_until(lambda: not uids(cluster, "replaced") & before, "all pods are replaced")
        wait_until(lambda: rollouts.ready_pods(events()) == uids(cluster, "replaced"), "the watch has seen all of it")
    found = rollouts.rollout_of(events(), before)
    if os.environ.get("RECORD_ROLLOUT"):
        rollouts.write_record(found)
    assert found == rollouts.read_record()
    cluster.run("helm", "uninstall", RELEASE, "--namespace", "replaced", "--wait", TIMEOUT)


def uids(cluster: Cluster, namespace: str) -> frozenset[str]:
    return frozenset(each["metadata"]["uid"] for each in cluster.get("pods", "--namespace", namespace))


def evict(cluster: Cluster, pod: str, status: int) -> str:
    """The API server's answer to an eviction."""
    path = f"/api/v1/namespaces/drained/pods/{pod}/eviction"
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": "drained"}}
    return cluster.run("kubectl", "create", "--raw", path, "-f", "-", status=status, stdin=json.dumps(body))
