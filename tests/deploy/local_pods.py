"""The pods of a rendered chart as local processes: their own commands, arguments, environment, mounts and probes.

Each container port of each pod is a port of the loopback. Connections that a pod makes are written down by strace.
"""

import base64
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from kube import NAMESPACE, ROOT, Object, Pod, of_kind, pods
from rollouts import Act, Rollout, Turn, workload
from valkeys import needs_client

from penstock.launcher.ports import free_ports
from servicekit.bus.embedded import find_server

LIMIT_S = 300.0
NOBODY = ("127.0.0.1", 1)  # whose replica a Valkey is until it is told who the primary is; inside its own pod
NUM_PORTS = 256  # more than all pods have, with those that take their places


def needs_strace() -> str:
    """The path of a strace that may trace; skips the test without one."""
    found = shutil.which("strace")
    if found is None:
        pytest.skip("no strace on PATH: install Debian's package strace to see which connections pods make")
    tried = subprocess.run([found, "-o", os.devnull, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"strace may not trace here: {tried.stderr.strip()}")
    return found


class LocalPod:
    """One pod; the first of a StatefulSet's name ends with -0."""

    def __init__(self, release: "LocalRelease", pod: Pod, name: str) -> None:
        self.pod, self.name, self.component = pod, name, pod.component
        self._release = release
        self._folder = release.folder / f"{name}-{next(release.numbers)}"
        self._folder.mkdir(parents=True)
        self.ports = release.ports_of(pod, name)
        self._mounts = self._make_mounts()
        self._process: subprocess.Popen[bytes] | None = None
        self.num_coming = 0  # clients that were sent to it and have not sent their request yet

    @property
    def trace(self) -> Path:
        """Where its connections are written down."""
        return self._folder / "connections"

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def start(self) -> None:
        container = self.pod.container
        command = [self._local(word) for word in (*container["command"], *(container.get("args") or ()))]
        strace = [needs_strace(), "-D", "-f", "-e", "trace=connect", "-e", "signal=none", "-o", str(self.trace)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*strace, *command],
                cwd=ROOT,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """By the probe that it starts with, and then the one that says whether it is given work."""
        for kind in ("startupProbe", "readinessProbe"):
            probe = self.pod.container[kind]
            wait_until(lambda probe=probe: self._passes(probe), f"{self.name}: {kind}", self._describe)

    def is_ready(self) -> bool:
        return self._passes(self.pod.container["readinessProbe"])

    def is_alive(self) -> bool:
        return self._passes(self.pod.container["livenessProbe"])

    def end(self) -> None:
        """As a kubelet ends it: its hook, SIGTERM, and no kill before its grace is over.

        The hook is taken to last until all who were sent to it before its endpoint went have sent their requests: on a
        busy machine some need longer than its few seconds.
        """
        assert self._process is not None
        hook = self.pod.container.get("lifecycle") or {}
        if command := hook.get("preStop", {}).get("exec", {}).get("command"):
            subprocess.run(command, check=True)
        wait_until(lambda: not self.num_coming, f"the clients of {self.name} have come")
        self._process.terminate()
        grace_s = self.pod.spec.get("terminationGracePeriodSeconds", 30)
        status = self._process.wait(grace_s)
        assert status == 0, f"{self.name}: status {status}; {self.log[-2000:]}"

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _describe(self) -> str:
        assert self._process is not None
        assert self._process.poll() is None, f"{self.name} has ended: {self.log[-2000:]}"
        return self.log[-2000:]

    def _passes(self, probe: Object) -> bool:
        if "exec" in probe:
            command = [self._local(word) for word in probe["exec"]["command"]]
            timeout_s = max(60, probe.get("timeoutSeconds", 1))
            try:
                ended = subprocess.run(
                    command, env=self._environment(), capture_output=True, timeout=timeout_s, check=False
                )
            except subprocess.TimeoutExpired:
                return False
            return not ended.returncode
        get = probe["httpGet"]
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port(get['port'])}{get['path']}", timeout=300
            ) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def port(self, name: str) -> int:
        """The port of the loopback that is this port of the container."""
        (number,) = (each["containerPort"] for each in self.pod.container["ports"] if each["name"] == name)
        return self.ports[number]

    def _environment(self) -> dict[str, str]:
        environment = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "VALKEY_SERVER": str(find_server()),
            "VALKEY_CLI": needs_client(),
            "POD_NAME": self.name,
        }
        for each in self.pod.container.get("env", ()):
            if "value" in each:
                environment[each["name"]] = self._local(each["value"])
            else:
                assert each["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}, each
        return environment

    def _local(self, text: str) -> str:
        """A word of the pod's, with names and paths of this machine."""
        text = text.replace("$(POD_NAME)", self.name)
        for host, port in self._release.hosts.items():
            text = text.replace(host, f"127.0.0.1:{port}")
        for number, port in self.ports.items():
            text = text.replace(f"0.0.0.0:{number}", f"127.0.0.1:{port}")
        paths = "|".join(map(re.escape, sorted(self._mounts, key=len, reverse=True)))
        return re.sub(rf"(?<![\w.-])({paths})(?![\w.-])", lambda found: str(self._mounts[found[1]]), text)

    def _make_mounts(self) -> dict[str, Path]:
        volumes = {each["name"]: each for each in self.pod.spec.get("volumes", ())}
        return {
            mount["mountPath"]: self._make_volume(mount["name"], volumes.get(mount["name"], {}))
            for mount in self.pod.container.get("volumeMounts", ())
        }

    def _make_volume(self, name: str, volume: Object) -> Path:
        if claim := volume.get("persistentVolumeClaim"):
            return self._release.claims[claim["claimName"]]
        if not volume:  # of a claim template: it stays when the pod goes
            place = self._release.folder / "claims" / f"{name}-{self.name}"
            place.mkdir(parents=True, exist_ok=True)
            return place
        place = self._folder / name
        place.mkdir()
        if source := volume.get("secret") or volume.get("configMap"):
            name = ("Secret", source["secretName"]) if "secret" in volume else ("ConfigMap", source["name"])
            files = self._release.files[name]
            for each in source.get("items") or [{"key": key, "path": key} for key in files]:
                (place / each["path"]).write_text(files[each["key"]])
        return place


class LocalRelease:
    """All pods of a rendered chart."""

    def __init__(
        self,
        folder: Path,
        objects: tuple[Object, ...],
        *,
        secrets: Mapping[str, Mapping[str, str]],
        claims: Mapping[str, Path],
    ) -> None:
        """Starts nothing yet.

        Args:
            folder: for everything that they write.
            objects: as helm rendered them.
            secrets: those that the chart expects to be there, by name and key.
            claims: volumes that it expects to be there.
        """
        self.folder, self.claims = folder, claims
        self.numbers = iter(range(1_000_000))
        self.files: dict[tuple[str, str], Mapping[str, str]] = {
            ("Secret", name): data for name, data in secrets.items()
        }
        for each in (*of_kind(objects, "Secret"), *of_kind(objects, "ConfigMap")):
            is_coded = each["kind"] == "Secret"
            data = {key: _decoded(value) if is_coded else value for key, value in (each.get("data") or {}).items()}
            self.files[each["kind"], each["metadata"]["name"]] = data | (each.get("stringData") or {})
        self._owner: dict[int, tuple[Pod, int]] = {}  # by port of the loopback: whose, and which of the container's
        self._free = iter(free_ports(NUM_PORTS))
        self._fixed: dict[tuple[str, int], int] = {}  # ports of pods whose names stay
        self.hosts: dict[str, int] = {}
        self.templates = pods(objects)
        for pod in self.templates:
            for name in self._names_that_stay(pod):
                service = f"{name}.{pod.owner['spec']['serviceName']}.{NAMESPACE}.svc.cluster.local"
                for number, port in self.ports_of(pod, name).items():
                    self._fixed[name, number] = port
                    self.hosts[f"{service}:{number}"] = port
        self.pods: tuple[LocalPod, ...] = ()  # those that are ready and not told to end: replaced, never changed
        self._all: list[LocalPod] = []
        self._lock = threading.Lock()

    def __enter__(self) -> "LocalRelease":
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._all:
            each.kill()

    def ports_of(self, pod: Pod, name: str) -> dict[int, int]:
        """By port of the container the port of the loopback."""
        numbers = [each["containerPort"] for each in pod.container["ports"]]
        known = {number: self._fixed[name, number] for number in numbers if (name, number) in self._fixed}
        ports = known or {number: next(self._free) for number in numbers}
        self._owner |= {port: (pod, number) for number, port in ports.items()}
        return ports

    def install(self) -> None:
        """Every pod; ready when this returns."""
        made = []
        for pod in self.templates:
            names = self._names_that_stay(pod) or [f"{pod.name}-{index}" for index in range(_replicas(pod))]
            made += [self._start(pod, name) for name in names]
        for each in made:
            self._wait_ready(each)

    def upgrade(self, rollout: Rollout) -> None:
        """Replace all pods, those of each workload in its recorded order, all workloads beside each other.

        Raises:
            AssertionError: a pod did not become ready, or did not end in order.
        """
        templates = {workload(each.labels): each for each in self.templates if _replicas(each)}
        assert templates.keys() == rollout.keys()
        with ThreadPoolExecutor(len(rollout)) as threads:
            done = [threads.submit(self._replace, templates[name], turns) for name, turns in rollout.items()]
        for each in done:
            each.result()

    def _replace(self, pod: Pod, turns: Sequence[Turn]) -> None:
        """As the controller of one workload does: it waits for pods to become ready, and for a name to be free."""
        old = {_ordinal(each): each for each in self.pods if each.pod is pod}
        new: dict[int, LocalPod] = {}
        ending: dict[int, Future[None]] = {}
        with ThreadPoolExecutor(len(turns)) as threads:
            for turn in turns:
                if turn.act is Act.END:
                    ended = (new if turn.is_new else old)[turn.number]
                    self._retract(ended)
                    ending[turn.number] = threads.submit(ended.end)
                elif turn.act is Act.READY:
                    self._wait_ready(new[turn.number])
                elif self._names_that_stay(pod):
                    ending[turn.number].result()
                    new[turn.number] = self._start(pod, old[turn.number].name)
                else:
                    new[turn.number] = self._start(pod, f"{pod.name}-next-{turn.number}")
        for each in ending.values():
            each.result()

    def of(self, component: str) -> list[LocalPod]:
        return [each for each in self.pods if each.component == component]

    @contextmanager
    def chosen(self, component: str, number: int) -> Iterator[tuple[LocalPod, Callable[[], None]]]:
        """One of those that are there, as a Service sends a client to it, and what to call once that has sent its
        request.
        """
        with self._lock:
            ready = self.of(component)
            assert ready, f"no {component} is ready"
            pod = ready[number % len(ready)]
            pod.num_coming += 1
        is_coming = True

        def has_come() -> None:
            nonlocal is_coming
            with self._lock:
                pod.num_coming -= is_coming
                is_coming = False

        try:
            yield pod, has_come
        finally:
            has_come()

    def connections(self) -> set[tuple[str, str, int]]:
        """Whoever connected to whom at which container port: components.

        Raises:
            AssertionError: somebody connected to what is no pod of the release.
        """
        found = set()
        for each in self._all:
            for address, port in _connected(each.trace.read_text(errors="replace")):
                if (address, port) == NOBODY:
                    continue
                owner = self._owner.get(port)
                assert owner is not None, f"{each.name} connected to {address}:{port}"
                found.add((each.component, owner[0].component, owner[1]))
        return found

    def _start(self, pod: Pod, name: str) -> LocalPod:
        started = LocalPod(self, pod, name)
        self._all.append(started)
        started.start()
        return started

    def _wait_ready(self, pod: LocalPod) -> None:
        """Until a Service would send somebody to it."""
        pod.wait_ready()
        with self._lock:
            self.pods = (*self.pods, pod)

    def _retract(self, pod: LocalPod) -> None:
        """Its endpoint goes with the beginning of its end."""
        with self._lock:
            self.pods = tuple(each for each in self.pods if each is not pod)

    def _names_that_stay(self, pod: Pod) -> list[str]:
        is_stateful = pod.owner["kind"] == "StatefulSet"
        return [f"{pod.name}-{index}" for index in range(_replicas(pod))] if is_stateful else []


def _replicas(pod: Pod) -> int:
    return int(pod.owner["spec"].get("replicas", 1))


def _ordinal(pod: LocalPod) -> int:
    return int(pod.name.rpartition("-")[2])


def _decoded(value: str) -> str:
    return base64.b64decode(value).decode()


def _connected(trace: str) -> set[tuple[str, int]]:
    """Addresses and ports of the TCP connections in what strace wrote."""
    four = r'sa_family=AF_INET, sin_port=htons\((\d+)\), sin_addr=inet_addr\("(.*?)"\)'
    six = r'sa_family=AF_INET6, sin6_port=htons\((\d+)\).*?inet_pton\(AF_INET6, "(.*?)"'
    return {(address, int(port)) for kind in (four, six) for port, address in re.findall(kind, trace)}


def wait_until(holds: Callable[[], bool], what: str, describe: Callable[[], str] = str) -> None:
    """Until something is so; `describe` may find before the time is over that it never will be.

    Raises:
        AssertionError: it is not, after a time that a busy machine keeps.
    """
    end = time.monotonic() + LIMIT_S
    while not holds():
        why = describe()
        assert time.monotonic() < end, f"not within {LIMIT_S:.0f} s: {what}: {why}"
        time.sleep(0.2)
