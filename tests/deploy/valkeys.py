"""The chart's Valkey servers and Sentinels as local processes: its own scripts, with addresses of the loopback."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from kube import CHART
from redis import Redis
from redis.exceptions import MasterDownError, ReadOnlyError, RedisError, ResponseError

from servicekit.bus.embedded import find_server
from servicekit.bus.interface import BusUnavailable
from servicekit.bus.redis_finder import read_directory

T = TypeVar("T")
LIMIT_S = 300.0
NAME = "penstock"
PASSWORDS = {"admin": "admin-of-tests", "services": "services-of-tests", "scaler": "scaler-of-tests"}


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    probes = [socket.socket() for _ in range(number)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def is_free(port: int) -> bool:
    """Return whether a server may listen there: one that was killed may still be on its way out."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def wait_until(ask: Callable[[], T], what: str) -> T:
    """Until something is so. Return the first true answer.

    Raises:
        AssertionError: there is none, after a time that a busy machine keeps.
    """
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        try:
            if answer := ask():
                return answer
        except (RedisError, OSError, BusUnavailable):
            pass
        time.sleep(0.2)
    raise AssertionError(f"not within {LIMIT_S:.0f} s: {what}")


class Pod:
    """One pod of the chart: its script, and what it would have mounted."""

    def __init__(self, kind: str, port: int, folder: Path, environment: dict[str, str]) -> None:
        self.kind, self.port, self.address = kind, port, f"127.0.0.1:{port}"
        self._folder = folder
        self._environment = environment | {
            "SELF": self.address,
            "DATA_DIR": str(folder / "data"),
            "RUN_DIR": str(folder / "run"),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """As a kubelet starts the container of a new pod: /run is empty, /data is what it was."""
        wait_until(lambda: is_free(self.port), f"port {self.port} is free")
        shutil.rmtree(self._folder / "run", ignore_errors=True)
        for name in ("run", "data"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", str(CHART / "files" / f"{self.kind}.sh"), "start"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def signal(self, number: signal.Signals) -> None:
        """To every process of the pod, as when its node goes."""
        assert self._process is not None
        os.killpg(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.wait()

    def kill(self) -> None:
        """Ends it at once; nothing if it has ended."""
        if self._process is not None:
            try:
                self.signal(signal.SIGKILL)
            except ProcessLookupError:
                self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Ends it in order, as a kubelet does."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(LIMIT_S)
        self.kill()

    def empty(self) -> None:
        """Its disk is lost."""
        shutil.rmtree(self._folder / "data")

    def run(self, command: str) -> int:
        """The exit status of a probe."""
        script = str(CHART / "files" / f"{self.kind}.sh")
        return subprocess.run(["sh", script, command], env=self._environment, check=False, timeout=LIMIT_S).returncode

    def log(self) -> str:
        """Its output so far."""
        return (self._folder / "log").read_text(errors="replace")

    def client(self, user: str = "admin") -> "Redis":
        """A connection; Sentinels ask for no password."""
        options: dict[str, Any] = {} if self.kind == "sentinel" else {"password": PASSWORDS[user]}
        if options and user != "admin":
            options["username"] = {"services": "penstock", "scaler": "scaler"}[user]
        if folder := self._environment.get("TLS_DIR"):
            options |= {"ssl": True, "ssl_ca_certs": f"{folder}/ca.crt"}
            options |= {"ssl_certfile": f"{folder}/tls.crt", "ssl_keyfile": f"{folder}/tls.key"}
        return Redis(
            host="127.0.0.1",
            port=self.port,
            socket_timeout=5,
            socket_connect_timeout=5,
            decode_responses=True,
            **options,
        )

    def info(self) -> dict[str, object]:
        """Its INFO replication; empty if it does not answer."""
        try:
            with self.client() as client:
                found: dict[str, object] = client.info("replication")
                return found
        except (RedisError, OSError):
            return {}


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates as in a Secret: tls.crt, tls.key and ca.crt of a folder."""

    folder: Path
    clients_show_theirs: bool


def needs_client() -> str:
    """The path of a client that the chart's scripts ask servers with; skips the test without one."""
    found = shutil.which("valkey-cli") or shutil.which("redis-cli")
    if found is None:
        pytest.skip("no valkey-cli or redis-cli on PATH, by which the chart's scripts ask servers: install redis-tools")
    return found


class Valkeys:
    """A primary, its replicas and three Sentinels, as the chart has them."""

    def __init__(
        self,
        folder: Path,
        *,
        servers: int = 2,
        patience_s: int = 120,
        program: Path | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            folder: for everything that they write.
            servers: the primary and its replicas.
            patience_s: as `valkey.sentinel.patienceSeconds`.
            program: the server; None: that which comes with Penstock.
            tls: certificates of all of them; None: no TLS.
        """
        cli = needs_client()
        ports = free_ports(servers + 3)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        passwords = folder / "passwords"
        passwords.mkdir(parents=True)
        for name, password in PASSWORDS.items():
            (passwords / name).write_text(password)
        settings = folder / "settings"
        settings.write_text("repl-backlog-size 16mb\n")
        environment = {
            "PATH": os.environ["PATH"],
            "VALKEY_SERVER": str(program or find_server()),
            "VALKEY_CLI": cli,
            "PEERS": " ".join(addresses[:servers]),
            "SERVERS": " ".join(addresses[:servers]),
            "SENTINELS": " ".join(addresses[servers:]),
            "PRIMARY_NAME": NAME,
            "QUORUM": "2",
            "DOWN_AFTER_MS": "2000",
            "FAILOVER_TIMEOUT_MS": "5000",
            "PATIENCE_S": str(patience_s),
            "POOL": NAME,
            "PASSWORD_DIR": str(passwords),
            "SETTINGS_FILE": str(settings),
            "RIGHTS_FILE": str(CHART / "files" / "rights"),
        }
        scheme, parameters = "sentinel", ""
        if tls is not None:
            environment |= {"TLS_DIR": str(tls.folder), "TLS_AUTH_CLIENTS": "yes" if tls.clients_show_theirs else "no"}
            scheme, parameters = "sentinels", f"?ssl_ca_certs={tls.folder}/ca.crt"
            if tls.clients_show_theirs:
                parameters += f"&ssl_certfile={tls.folder}/tls.crt&ssl_keyfile={tls.folder}/tls.key"
        self.servers = [Pod("valkey", port, folder / f"valkey-{port}", environment) for port in ports[:servers]]
        self.sentinels = [Pod("sentinel", port, folder / f"sentinel-{port}", environment) for port in ports[servers:]]
        user = f"penstock:{PASSWORDS['services']}@"
        self.url = f"{scheme}://{user}{','.join(each.address for each in self.sentinels)}/{NAME}{parameters}"

    def start(self) -> None:
        for each in (*self.servers, *self.sentinels):
            each.start()

    def __enter__(self) -> "Valkeys":
        return self

    def __exit__(self, *_: object) -> None:
        for each in (*self.servers, *self.sentinels):
            each.kill()

    def primary(self) -> Pod | None:
        """The one server that is a primary and that all Sentinels name; None: there is none, or they disagree."""
        primaries = [each for each in self.servers if each.info().get("role") == "master"]
        named = set()
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                named.add(client.sentinel_get_master_addr_by_name(NAME))
        return primaries[0] if len(primaries) == 1 and named == {("127.0.0.1", primaries[0].port)} else None

    def is_found(self) -> bool:
        """Return whether services that ask the Sentinels are sent to the primary."""
        primary = self.primary()
        address = read_directory(self.url).finder().find()
        return primary is not None and (address.host, address.port) == ("127.0.0.1", primary.port)

    def whole(self) -> Pod | None:
        """The primary, if every other server has a complete copy; None otherwise."""
        primary = self.primary()
        replicas = [each.info() for each in self.servers if each is not primary]
        is_whole = all(
            each.get("master_link_status") == "up" and each.get("slave_priority") == 100 for each in replicas
        )
        return primary if is_whole else None

    def knows_replicas(self) -> bool:
        """Return whether all Sentinels could promote a replica."""
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                replicas = client.sentinel_slaves(NAME)
            states = [(each["flags"], each["slave-priority"]) for each in replicas]
            if states != [("slave", 100)] * (len(self.servers) - 1):
                return False
        return True

    def wait_until(self, ask: Callable[[], T], what: str) -> T:
        """Until something is so; if it does not become so, the error has the logs."""
        try:
            return wait_until(ask, what)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.describe()}") from error

    def wait_whole(self) -> Pod:
        """The primary, once everything is as it should be."""
        primary = self.wait_until(self.whole, "one primary with complete copies")
        assert primary is not None
        return primary

    def ask_primary(self, user: str, *words: str) -> str:
        """The answer to a command, a refusal as well. Asked again where the server does not answer, or is the primary
        no more: Sentinels promote another where a machine stalls for longer than they wait.
        """

        def ask() -> str | None:
            primary = self.whole()
            if primary is None:
                return None
            with primary.client(user) as client:
                try:
                    return str(client.execute_command(*words))
                except (ReadOnlyError, MasterDownError):
                    return None
                except ResponseError as error:
                    return str(error)

        answer = self.wait_until(ask, f"an answer to {words[0]}")
        assert answer is not None
        return answer

    def describe(self) -> str:
        """The state of each server, the primary that each Sentinel names, and the ends of all logs."""
        states = [f"{each.address} is {each.info()}" for each in self.servers]
        for sentinel in self.sentinels:
            try:
                with sentinel.client() as client:
                    named = str(client.sentinel_get_master_addr_by_name(NAME))
            except (RedisError, OSError) as error:
                named = f"nobody ({error})"
            states.append(f"{sentinel.address} names {named}")
        logs = [f"{each.address}: {each.log()[-600:]}" for each in (*self.servers, *self.sentinels)]
        return "; ".join((*states, *logs))


class Writes:
    """Those that were copied, of which none may be lost."""

    def __init__(self, valkeys: Valkeys, *, on_disks: bool) -> None:
        """Writes nothing yet.

        Args:
            valkeys: the servers.
            on_disks: wait until the disks of all servers have a write; otherwise until the replicas have it in memory,
                which servers older than Redis 7.2 can tell, too.
        """
        self._valkeys = valkeys
        self._on_disks = on_disks
        self._tried: set[str] = set()
        self._kept: set[str] = set()

    def add(self) -> Pod:
        """One more, in the copies of all replicas. Return the primary: where a machine stalls for longer than Sentinels
        wait, another server becomes it without any fault.
        """
        primary = self._valkeys.wait_until(self._try, "every copy has it")
        self._kept.add(str(len(self._tried) - 1))
        assert primary is not None
        return primary

    def _try(self) -> Pod | None:
        """A write of its own for each connection: only what came by the same is waited for."""
        primary = self._valkeys.whole()
        if primary is None:
            return None
        self._tried.add(written := str(len(self._tried)))
        with primary.client() as client:
            client.sadd(f"{{{NAME}}}:written", written)
            return primary if self._wait(client) else None

    def _wait(self, client: Redis) -> bool:
        """Return whether the copies have what came by this connection; waits for up to two seconds."""
        replicas = len(self._valkeys.servers) - 1
        if not self._on_disks:
            return bool(client.wait(replicas, 2000) == replicas)
        copies = [1, replicas]
        return bool(client.execute_command("WAITAOF", *copies, 2000) == copies)

    def assert_kept(self) -> None:
        """Asks the primary, once everything is as it should be; another one if it is not the primary any more."""

        def read() -> tuple[set[str]] | None:
            primary = self._valkeys.whole()
            if primary is None:
                return None
            with primary.client("services") as client:
                return (client.smembers(f"{{{NAME}}}:written"),)

        found = self._valkeys.wait_until(read, "what was written is read")
        assert found is not None
        assert self._kept <= found[0] <= self._tried
