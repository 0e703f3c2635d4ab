"""The chart's servers and Sentinels over TLS: its own scripts, real certificates, and a server that was built for it.

The server that comes with Penstock was not; Debian's Redis was.
"""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.retry import Retry
from test_valkey_failover import all_at_once, ended_in_order, killed
from valkeys import NAME, Pod, Tls, Valkeys, Writes, free_ports, wait_until

from servicekit.bus import open_bus
from servicekit.bus.calls import ListSessions


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a Secret's volume."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.crt")
    issued.private_key_pem.write_to_path(folder / "tls.key")
    for each in issued.cert_chain_pems:
        each.write_to_path(folder / "tls.crt", append=True)
    return folder


@pytest.fixture(scope="module")
def program(certificates: Path) -> Path:
    """A server with TLS; skips the tests where there is none."""
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found and _has_tls(Path(found), certificates):
            return Path(found)
    pytest.skip("no valkey-server or redis-server with TLS on PATH: install Debian's package redis-server")


def _has_tls(program: Path, certificates: Path) -> bool:
    """Return whether a server comes up with certificates; one that was built without TLS ends."""
    (port,) = free_ports(1)
    files = {"cert-file": "tls.crt", "key-file": "tls.key", "ca-cert-file": "ca.crt"}
    flags = [word for flag, file in files.items() for word in (f"--tls-{flag}", str(certificates / file))]
    command = [str(program), "--port", "0", "--tls-port", str(port), "--save", "", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: process.poll() is not None or _listens(port), "it listens, or ends")
        return process.poll() is None
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 5):
        return True


@pytest.fixture(params=[False, True], ids=["clients_are_let_in", "clients_show_certificates"])
def asks_for_certificates(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def valkeys(tmp_path: Path, program: Path, certificates: Path, asks_for_certificates: bool) -> Iterator[Valkeys]:
    with Valkeys(tmp_path, program=program, tls=Tls(certificates, asks_for_certificates)) as valkeys:
        valkeys.start()
        yield valkeys


def test_servers_and_sentinels_find_each_other_and_fail_over(valkeys: Valkeys) -> None:
    writes = Writes(valkeys, on_disks=False)
    for fault in (killed, ended_in_order, all_at_once):
        fault(valkeys, writes.add())
        writes.assert_kept()


def reply(pod: Pod, **options: Any) -> str:
    """The answer to somebody without a password; empty: there is no connection."""
    try:
        with Redis(port=pod.port, host="127.0.0.1", socket_timeout=5, retry=Retry(NoBackoff(), 0), **options) as client:
            return str(client.execute_command("PING"))
    except AuthenticationError:
        return "a password is asked for"
    except RedisError:
        return ""


def test_nobody_is_let_in_without_tls_and_where_it_is_asked_for_without_a_certificate(
    valkeys: Valkeys, certificates: Path, asks_for_certificates: bool
) -> None:
    valkeys.wait_whole()
    trust = {"ssl": True, "ssl_ca_certs": str(certificates / "ca.crt")}
    shown = {"ssl_certfile": str(certificates / "tls.crt"), "ssl_keyfile": str(certificates / "tls.key")}
    for pods, greeting in ((valkeys.servers, "a password is asked for"), (valkeys.sentinels, "True")):
        for pod in pods:
            wait_until(lambda: pod.run("alive") == 0, "it is alive")  # noqa: B023
            wait_until(lambda: pod.run("ready") == 0, "it is ready")  # noqa: B023
            assert reply(pod) == ""
            assert not asks_for_certificates or reply(pod, **trust) == ""
            # One that stands still for a while does not answer in time.
            for let_in in [trust | shown] if asks_for_certificates else [trust, trust | shown]:
                wait_until(lambda: reply(pod, **let_in) == greeting, "it answers")  # noqa: B023


def test_a_pool_finds_the_primary_and_serves_there(valkeys: Valkeys) -> None:
    valkeys.wait_until(valkeys.is_found, "the pool finds the primary")
    connection = open_bus(valkeys.url, NAME).connect()
    try:
        assert connection.call(ListSessions()) == []
    finally:
        connection.close()
