"""HTTPS of a gateway."""

import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import trustme
from running_gateway import RunningGateway

from servicekit import tls

BODY = {"model": "tiny", "prompt": "x", "stream": True}


def context(ca: trustme.CA, client: trustme.LeafCert | None = None) -> ssl.SSLContext:
    made = ssl.create_default_context()
    ca.configure_trust(made)
    if client:
        client.configure_cert(made)
    return made


def test_calls_are_encrypted_and_new_certificates_count_for_new_connections(
    launch: Callable[..., RunningGateway], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "CHECK_S", 0.0)
    one, other = trustme.CA(), trustme.CA()
    files = {name: tmp_path / name for name in ("tls_cert", "tls_key", "tls_client_ca")}

    def write(server: trustme.CA, clients: trustme.CA) -> None:
        signed = server.issue_cert("127.0.0.1")
        files["tls_cert"].write_bytes(b"".join(each.bytes() for each in signed.cert_chain_pems))
        files["tls_key"].write_bytes(signed.private_key_pem.bytes())
        files["tls_client_ca"].write_bytes(clients.cert_pem.bytes())

    write(one, other)
    gateway = launch(**files)
    url = f"https://127.0.0.1:{gateway.service.http_port}"

    def status(server: trustme.CA, client: trustme.CA | None) -> int | None:
        shown = client.issue_cert("client.example.org") if client else None
        try:
            return httpx.post(
                f"{url}/v1/completions", json=BODY, verify=context(server, shown), timeout=300, trust_env=False
            ).status_code
        except httpx.TransportError:
            return None

    assert [status(one, client) for client in (other, one, None)] == [200, None, None]
    assert status(other, other) is None
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{gateway.service.http_port}/version", timeout=300, trust_env=False)
    shown, limits = other.issue_cert("c.example.org"), httpx.Limits(keepalive_expiry=None)  # else it is kept for 5 s
    with httpx.Client(verify=context(one, shown), timeout=300, trust_env=False, limits=limits) as kept:
        assert kept.get(f"{url}/version").status_code == 200
        write(other, one)
        assert [status(other, client) for client in (one, other, None)] == [200, None, None]
        assert kept.get(f"{url}/version").status_code == 200, "a connection that was made goes on"
