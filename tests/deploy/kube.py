"""The programs of these tests: helm and kubectl, and a control plane to try charts on."""

import functools
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "penstock"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
RELEASE, NAMESPACE = "llm", "serving"
LIMIT_S = 600
ATTEMPTS = 3  # to start a control plane
HEARTBEAT_S = 8

Object = dict[str, Any]


def cluster_program() -> Path | None:
    """The program that starts a control plane and has helm: `shared/kube/cluster` beside the checkout, or above it."""
    return next((path for each in ROOT.parents if (path := each / "shared" / "kube" / "cluster").is_file()), None)


@functools.cache
def programs() -> Mapping[str, str]:
    """An environment in which helm and kubectl are found, if they are anywhere."""
    environment = dict(os.environ)
    if program := cluster_program():
        line = subprocess.run([program, "unpack"], check=True, capture_output=True, text=True).stdout.strip()
        folder = line.removeprefix("export PATH=").removesuffix(":$PATH")
        environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
    return environment


def needs(program: str) -> str:
    """The path of a program; skips the test without it."""
    found = shutil.which(program, path=programs()["PATH"])
    if found is None:
        pytest.skip(f"no {program}: neither shared/kube/cluster beside the checkout nor on PATH")
    return found


def helm_template(*arguments: str, release: str = RELEASE) -> "subprocess.CompletedProcess[str]":
    """`helm template` of the chart."""
    command = [needs("helm"), "template", release, str(CHART), "--namespace", NAMESPACE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@functools.cache
def render(*arguments: str, release: str = RELEASE) -> tuple[Object, ...]:
    """The objects that the chart becomes with these arguments of helm."""
    done = helm_template(*arguments, release=release)
    assert done.returncode == 0, done.stderr
    return tuple(each for each in yaml.safe_load_all(done.stdout) if each)


def refusal(*arguments: str) -> str:
    """Why helm does not take these values."""
    done = helm_template(*arguments)
    assert done.returncode != 0, "the values were taken"
    return done.stderr


def settings(**values: Any) -> tuple[str, ...]:
    """Arguments of helm that set values: `workers__main__replicas=2`; two underscores are a dot."""
    return tuple(
        argument
        for name, value in values.items()
        for argument in ("--set-json", f"{name.replace('__', '.')}={json.dumps(value)}")
    )


def example(name: str) -> tuple[str, str]:
    """The arguments of helm that take an example."""
    return "--values", str(CHART / "examples" / f"{name}.yaml")


HUB = settings(model__hub__id="Qwen/Qwen3-0.6B")


@dataclass(frozen=True)
class Pod:
    """A pod template, and the object that makes pods of it."""

    owner: Object
    template: Object

    @property
    def name(self) -> str:
        return str(self.owner["metadata"]["name"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def spec(self) -> Object:
        return dict(self.template["spec"])

    @property
    def container(self) -> Object:
        return dict(self.spec["containers"][0])

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]


def pods(objects: tuple[Object, ...]) -> list[Pod]:
    """The pods of a rendered chart."""
    found = []
    for each in objects:
        if each["kind"] in ("Deployment", "StatefulSet"):
            found.append(Pod(each, each["spec"]["template"]))
        elif each["kind"] == "LeaderWorkerSet":
            found.append(Pod(each, each["spec"]["leaderWorkerTemplate"]["workerTemplate"]))
    return found


def of_kind(objects: tuple[Object, ...], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


class Cluster:
    """A control plane whose kubelets are simulated."""

    def __init__(self, environment: Mapping[str, str], directory: Path) -> None:
        self._environment = environment
        self._directory = directory

    def run(self, *command: str, status: int = 0, stdin: str | None = None) -> str:
        """The output of a program, on either way out; it must end with `status`."""
        done = self._run(*command, stdin=stdin)
        if done.returncode != status:
            raise AssertionError(f"{' '.join(command)}: {done.stdout}{done.stderr}\n{self._describe()}")
        return done.stdout + done.stderr

    def runs_pods(self) -> bool:
        """Return whether all of it is at work: a pod is placed on a node and becomes ready."""
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe", "namespace": "default"}}
        pod["spec"] = {"containers": [{"name": "probe", "image": "probe"}]}
        self.apply(pod)
        waited = self._run("kubectl", "wait", "--for=condition=Ready", "pod/probe", "-n", "default", "--timeout=60s")
        self._run("kubectl", "delete", "pod/probe", "-n", "default", "--wait=true")
        return waited.returncode == 0

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Renew the leases of the nodes, as kubelets do.

        The simulated ones do not: after 50 seconds nodes count as lost for a moment, and pods as not ready for good.
        """
        stopping = threading.Event()
        nodes = [each["metadata"]["name"] for each in self.get("nodes")]

        def renew() -> None:
            while True:
                now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
                with suppress(AssertionError, subprocess.TimeoutExpired):  # then the next time
                    self.apply(*(_lease(node, now) for node in nodes))
                if stopping.wait(HEARTBEAT_S):
                    return

        thread = threading.Thread(target=renew)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()

    @contextmanager
    def watch_pods(self, namespace: str, output: Path) -> Iterator[None]:
        """Write what happens to the pods of a namespace into a file; begin with those that are there."""
        flags = ("--watch", "--output-watch-events", "-o", "json")
        with output.open("wb") as file:
            command = [needs("kubectl"), "get", "pods", "--namespace", namespace, *flags]
            process = subprocess.Popen(command, env=self._environment, stdout=file)
        try:
            yield
        finally:
            process.terminate()
            process.wait(LIMIT_S)

    def _describe(self) -> str:
        """Its nodes and pods, and the last words of its parts."""
        told = [self._run("kubectl", "get", "nodes,pods", "--all-namespaces").stdout]
        for log in sorted(self._directory.glob("*.log")):
            told += [f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-5:]]
        return "\n".join(told)

    def _run(self, *command: str, stdin: str | None = None) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [needs(command[0]), *command[1:]],
            env=self._environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=6 * LIMIT_S,  # helm's and kubectl's own limit comes first
            check=False,
        )

    def get(self, *what: str) -> list[Object]:
        """Objects, as `kubectl get` finds them."""
        done = self._run("kubectl", "get", "-o", "json", *what)
        assert done.returncode == 0, done.stderr
        found: list[Object] = json.loads(done.stdout)["items"]
        return found

    def apply(self, *objects: Object) -> None:
        self.run(
            "kubectl", "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        )


def _lease(node: str, renewed: str) -> Object:
    spec = {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": renewed}
    metadata = {"name": node, "namespace": "kube-node-lease"}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


@contextmanager
def started_cluster(directory: Path) -> Iterator[Cluster]:
    """A control plane for as long as it is needed; skips the test where there is none."""
    program = cluster_program()
    if program is None:
        pytest.skip("no control plane: shared/kube/cluster is not beside the checkout")
    for _ in range(ATTEMPTS):
        up = [program, "up", "--dir", directory]
        started = subprocess.run(up, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        cluster = Cluster({**programs(), "KUBECONFIG": str(directory / "kubeconfig")}, directory)
        try:
            # Its parts take ports that were free a moment ago: one of them may have come too late and have ended.
            if started.returncode == 0 and cluster.runs_pods():
                with cluster.heartbeat():
                    yield cluster
                return
        finally:
            subprocess.run([program, "down", "--dir", directory], check=False, timeout=LIMIT_S)
    raise AssertionError(f"no control plane in {ATTEMPTS} attempts: {started.stderr}")
