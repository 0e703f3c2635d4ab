"""TLS and mTLS of gRPC and metrics, and health beside them without either."""

import asyncio
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
import trustme
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contract.domain.errors import ErrorCode, PenstockError
from penstock.client import ClientTls
from servicekit import tls as tls_module
from servicekit.metrics import HealthEndpoint, MetricsEndpoint, make_registry
from servicekit.rpc import RpcServer
from servicekit.settings import ServiceSettings
from servicekit.tls import TlsIdentity, open_identity
from servicekit.tls_files import TlsFiles

LIMIT_S = 180.0


class Vitals:
    is_ready = is_alive = True


class Authority:
    """A certificate authority, and what it has signed."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name, self._ca = folder, name, trustme.CA()
        self.path = folder / f"{name}-ca.pem"
        self._ca.cert_pem.write_to_path(str(self.path))
        self.cert, self.key = self.sign("own")

    def sign(self, what: str) -> tuple[Path, Path]:
        """The files of a certificate and its key."""
        signed = self._ca.issue_cert("localhost", "127.0.0.1")
        cert, key = self._folder / f"{self._name}-{what}.pem", self._folder / f"{self._name}-{what}.key"
        cert.write_bytes(b"".join(each.bytes() for each in signed.cert_chain_pems))
        signed.private_key_pem.write_to_path(str(key))
        return cert, key


@pytest.fixture
def one(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "one")


@pytest.fixture
def other(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "other")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_module, "CHECK_S", 0.0)


def get(port: int, ca: Path, client: Authority | None = None, path: str = "/metrics") -> int | None:
    """The status; None: the connection was not made."""
    context = ssl.create_default_context(cafile=str(ca))
    if client:
        context.load_cert_chain(client.cert, client.key)
    try:
        with urllib.request.urlopen(f"https://localhost:{port}{path}", timeout=LIMIT_S, context=context) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def replaced(files: TlsFiles, by: Authority) -> None:
    """As a certificate is renewed: each file as a whole."""
    for target, source in ((files.cert, by.cert), (files.key, by.key)):
        new = target.with_suffix(".new")
        new.write_bytes(source.read_bytes())
        new.replace(target)


def served(files: TlsFiles, test: Callable[[int, RpcServer], Any]) -> None:
    async def run() -> None:
        server = RpcServer([], tls=TlsIdentity(files))
        port = await server.start("127.0.0.1:0")
        try:
            await test(port, server)
        finally:
            await server.stop(0)

    asyncio.run(run())


async def checks(port: int, tls: ClientTls | None) -> bool:
    """Return whether a gRPC client gets an answer."""
    address = f"localhost:{port}"
    channel = aio.insecure_channel(address) if tls is None else aio.secure_channel(address, tls.credentials())
    async with channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return False
            raise
    return True


def test_grpc_is_encrypted_and_takes_a_new_certificate(one: Authority, other: Authority) -> None:
    files = TlsFiles(*one.sign("served"))

    async def test(port: int, _: RpcServer) -> None:
        assert not await checks(port, None)
        assert (await checks(port, ClientTls(one.path)), await checks(port, ClientTls(other.path))) == (True, False)
        replaced(files, other)
        assert (await checks(port, ClientTls(one.path)), await checks(port, ClientTls(other.path))) == (False, True)

    served(files, test)


def test_grpc_lets_in_who_shows_a_certificate_of_the_authority(one: Authority, other: Authority) -> None:
    files = TlsFiles(one.cert, one.key, other.path)

    async def test(port: int, server: RpcServer) -> None:
        assert not await checks(port, ClientTls(one.path))
        assert not await checks(port, ClientTls(one.path, one.cert, one.key))
        assert await checks(port, ClientTls(one.path, other.cert, other.key))
        health = await server.start_health("127.0.0.1:0")
        assert await checks(health, None), "a probe has no certificate"
        other.path.write_bytes(one.path.read_bytes())
        assert not await checks(port, ClientTls(one.path, other.cert, other.key))
        assert await checks(port, ClientTls(one.path, one.cert, one.key))

    served(files, test)


def test_metrics_are_encrypted_and_take_new_certificates_and_authorities(one: Authority, other: Authority) -> None:
    files = TlsFiles(*one.sign("served"), other.path)
    endpoint = MetricsEndpoint("127.0.0.1:0", make_registry([]), Vitals(), tls=TlsIdentity(files))
    try:
        port = endpoint.port
        assert get(port, one.path, other) == get(port, one.path, other, "/health") == 200
        assert get(port, one.path) is get(port, one.path, one) is get(port, other.path, other) is None
        with pytest.raises(OSError):  # noqa: PT011  (however the connection ends)
            urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=LIMIT_S).close()
        replaced(files, other)
        assert (get(port, one.path, other), get(port, other.path, other)) == (None, 200)
        other_ca = other.path.read_bytes()
        trusted = other.path.with_name("trusted.pem")
        trusted.write_bytes(other_ca)
        other.path.write_bytes(one.path.read_bytes())
        assert (get(port, trusted, other), get(port, trusted, one)) == (None, 200)
    finally:
        endpoint.close()


def test_health_has_a_port_with_nothing_else_on_it() -> None:
    endpoint = HealthEndpoint("127.0.0.1:0", Vitals())
    try:
        found = {}
        for path in ("/health", "/ready", "/metrics", "/"):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}{path}", timeout=LIMIT_S) as reply:
                    found[path] = reply.status
            except urllib.error.HTTPError as error:
                found[path] = error.code
        assert found == {"/health": 200, "/ready": 200, "/metrics": 404, "/": 404}
    finally:
        endpoint.close()


def test_files_that_cannot_be_used_change_nothing_and_are_told_once(one: Authority, other: Authority) -> None:
    files = TlsFiles(*one.sign("served"))
    endpoint = MetricsEndpoint("127.0.0.1:0", make_registry([]), Vitals(), tls=TlsIdentity(files))
    try:
        for content in (b"nonsense", other.cert.read_bytes(), None):  # the second has another key
            files.cert.unlink()
            if content is not None:
                files.cert.write_bytes(content)
            with structlog.testing.capture_logs() as lines:
                assert get(endpoint.port, one.path) == get(endpoint.port, one.path) == 200
            assert [line["event"] for line in lines] == ["the TLS files from before stay valid"]
        replaced(files, other)
        assert get(endpoint.port, other.path) == 200
    finally:
        endpoint.close()


@pytest.mark.parametrize("missing", ["cert", "key", "client_ca"])
def test_nothing_starts_with_files_that_cannot_be_used(one: Authority, missing: str) -> None:
    paths: dict[str, Path] = {"cert": one.cert, "key": one.key, "client_ca": one.path}
    paths[missing] = one.path.with_name("absent")
    with pytest.raises(PenstockError, match="the TLS files cannot be used") as caught:
        open_identity(TlsFiles(**paths))
    assert caught.value.code is ErrorCode.INTERNAL


def test_half_of_the_settings_is_an_error_and_none_is_no_tls(one: Authority) -> None:
    assert open_identity(ServiceSettings().tls_files) is None
    for given in ({"tls_cert": one.cert}, {"tls_key": one.key}, {"tls_client_ca": one.path}):
        with pytest.raises(PenstockError, match="both of them"):
            _ = ServiceSettings(**given).tls_files
