"""A server whose user may do only what the documentation says; secrets that nobody gets to see."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import hiredis
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from served import ROOT, SIMULATED, Served, wait_until

from contract.domain.api_keys import CONTROL_TOKEN_HEADER, hash_api_key
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import SamplingParams
from penstock.client import Client
from penstock.v1 import (
    scheduler_pb2,
    scheduler_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from servicekit.bus.commands import pack
from servicekit.bus.embedded import EmbeddedServer
from servicekit.bus.redis_address import parse_address

PASSWORD, ADMIN_PASSWORD = "p4ss/w:rd@1", "4dm1n-pass"
KEY = "psk_very-secret-key"
CALLS = {
    "tokenizer": tokenizer_pb2.TokenizeCall(text="x"),
    "scheduler": scheduler_pb2.GetSchedulerStatusCall(),
    "worker": worker_pb2.GetWorkerStatusCall(),
}
PROMPT = "my-very-private-prompt"


def documented_rule() -> list[str]:
    text = (ROOT / "docs/security.md").read_text("utf-8")
    (rule,) = re.findall(r"^ACL SETUSER penstock on >PASSWORD (.*)$", text, re.MULTILINE)
    return str(rule).split()


def command(url: str, *words: str) -> object:
    reader = hiredis.Reader(encoding="utf-8")
    with parse_address(url).open_socket() as sock:
        sock.sendall(pack(("AUTH", "admin", ADMIN_PASSWORD)) + pack(words))
        replies: list[object] = []
        while len(replies) < 2:
            reader.feed(sock.recv(1 << 16))
            while (reply := reader.gets()) is not False:
                replies.append(reply)
    return replies[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """Nobody gets in but the documented user, and an administrator."""
    own = EmbeddedServer(tmp_path_factory.mktemp("data"), port=0)
    own.start()
    reader = hiredis.Reader(encoding="utf-8")
    with parse_address(own.url).open_socket() as sock:
        for words in (
            ("ACL", "SETUSER", "admin", "on", f">{ADMIN_PASSWORD}", "~*", "&*", "+@all"),
            ("ACL", "SETUSER", "penstock", "on", f">{PASSWORD}", *documented_rule()),
            ("ACL", "SETUSER", "default", "off"),
        ):
            sock.sendall(pack(words))
            reader.feed(sock.recv(1 << 16))
            assert reader.gets() == "OK", words
    yield own
    own.close()


@pytest.fixture(scope="module")
def served(server: EmbeddedServer, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("secured")
    secret, keys = folder / "password", folder / "keys"
    secret.write_text(PASSWORD + "\n")
    keys.write_text(f'{{"tenant": "one", "sha256": "{hash_api_key(KEY).hex()}"}}\n')
    url = server.url.replace("://", "://penstock@")
    flags = (f"--model={checkpoint}", "--served-model-name=simulated", "--step-ms=1", *SIMULATED)
    with Served(
        folder,
        *flags,
        f"--redis-password-file={secret}",
        f"--api-keys-file={keys}",
        "--log-level=info",
        environ={"PENSTOCK_REDIS_URL": url},
    ) as served:
        yield served.wait_ready()


def test_the_documented_user_is_enough_for_everything(server: EmbeddedServer, served: Served) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=served.http_url, headers=headers, timeout=300) as http:
        reply = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 20, "n": 2, "stop": ["zzz"]})
        assert reply.status_code == 200, reply.text
        refused = http.post("/v1/completions", json={"prompt": PROMPT * 1000, "max_tokens": 20})
        assert refused.status_code == 400
        with http.stream(
            "POST", "/v1/completions", json={"prompt": PROMPT, "max_tokens": 3000, "stream": True, "ignore_eos": True}
        ) as stream:
            next(stream.iter_lines())
            request_id = stream.headers["x-penstock-request-id"]
            assert http.delete(f"/v1/requests/{request_id}").status_code == 200
        assert http.get("/v1/models").status_code == 200
        wait_until(lambda: "penstock_queue_depth" in http.get("/metrics").text, "the metrics")
    # Whatever was refused is in the server's own list, the first attempt of the launcher's probe included.
    log = command(server.url, "ACL", "LOG")
    assert isinstance(log, list)
    denied = [dict(zip(entry[::2], entry[1::2], strict=True)) for entry in log]
    assert [entry for entry in denied if entry["username"] == "penstock"] == []


def test_the_rule_names_what_the_source_uses_and_nothing_else() -> None:
    folder = ROOT / "servicekit/bus"
    lua = "".join(path.read_text("utf-8") for path in folder.glob("functions/*.lua"))
    called = {word.lower() for word in re.findall(r"redis\.call\('([A-Z]+)'", lua)}
    python = (folder / "commands.py").read_text("utf-8")
    sent = {word.lower() for word in re.findall(r'\(\s*b"([A-Z]{4,})"', python)} - {"block", "maxlen"}  # options
    named = {word[1:].partition("|")[0] for word in documented_rule() if word.startswith("+")}
    handshake = {"auth", "select", "function"}
    assert named == called | sent | handshake


def test_no_secret_is_in_a_log_or_on_a_command_line(served: Served) -> None:
    with pytest.raises(PenstockError):
        served.client().complete(PROMPT, SamplingParams(max_tokens=2))  # without a key
    written = served.out + served.err
    assert "listening" in written
    for secret in (PASSWORD, "p4ss", KEY, PROMPT, ADMIN_PASSWORD):
        assert secret not in written
    for pid in served.pids().values():
        assert b"p4ss" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_who_has_a_key_can_control_nothing_and_who_has_the_token_can(served: Served) -> None:
    """The launcher makes a token where callers need keys, and says where it is."""
    found = re.search(r"--control-token-file (\S+)", served.out)
    assert found
    path = Path(found[1])
    assert path.stat().st_mode & 0o077 == path.parent.stat().st_mode & 0o077 == 0
    token = path.read_text().strip()
    assert token not in served.out + served.err
    for pid in served.pids().values():
        assert token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    with Client(served.grpc_address, api_key=KEY) as tenant, pytest.raises(PenstockError) as caught:
        tenant.pipeline()
    assert caught.value.code is ErrorCode.UNAUTHENTICATED
    with Client(served.grpc_address, control_token=token) as operator:
        sessions = {session.kind: session for session in operator.pipeline().sessions}
    for name, read in (
        ("tokenizer", lambda c: tokenizer_pb2_grpc.TokenizerStub(c).Tokenize),
        ("scheduler", lambda c: scheduler_pb2_grpc.SchedulerStub(c).GetStatus),
        ("worker", lambda c: worker_pb2_grpc.WorkerStub(c).GetStatus),
    ):
        with grpc.insecure_channel(sessions[name].address) as channel:
            method, call = read(channel), CALLS[name]
            for metadata in ((), (("authorization", f"Bearer {KEY}"),), ((CONTROL_TOKEN_HEADER, token + "x"),)):
                with pytest.raises(grpc.RpcError) as refused:
                    method(call, metadata=metadata, timeout=300)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert method(call, metadata=((CONTROL_TOKEN_HEADER, token),), timeout=300)
            assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=300).status
    command = [sys.executable, "-m", "penstock.cli", "status", f"--address={served.grpc_address}"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300, check=False).returncode == 1
    told = subprocess.run(
        [*command, f"--control-token-file={path}"], cwd=ROOT, capture_output=True, timeout=300, check=False
    )
    assert told.returncode == 0, told.stderr
