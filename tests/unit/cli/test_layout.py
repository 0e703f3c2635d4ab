import socket
import sys
from pathlib import Path

import pytest

from contract.domain.errors import PenstockError
from penstock.launcher.layout import (
    BUNDLED_NAME,
    Child,
    Launch,
    callable_address,
    children,
    hold_ports,
    parse,
)
from penstock.launcher.ports import free_ports
from servicekit.bus.calls import SessionKind

URL = "unix:///tmp/server.sock"


def launch(*argv: str, **environ: str) -> Launch:
    return parse(argv, environ)


def flag(child: Child, name: str) -> str | None:
    """What a child is told last: that is what counts."""
    values = [each.partition("=")[2] for each in child.flags if each.partition("=")[0] == name]
    return values[-1] if values else None


def test_one_process_of_each_service_by_default() -> None:
    made = children(launch(), URL)
    assert [child.module for child in made] == [
        "gateway_svc", "tokenizer_svc", "scheduler_svc", "worker_svc", "detokenizer_svc",
    ]  # fmt: skip
    assert {child.redis_url for child in made} == {URL}
    assert not any(URL in each for child in made for each in child.flags), "it may hold a password"
    secret = "redis://:secret@127.0.0.1:1/0"
    for given in (launch(f"--redis-url={secret}"), launch(PENSTOCK_REDIS_URL=secret)):
        assert given.redis_url == secret
        assert not any("secret" in each for child in children(given, secret) for each in child.flags)
    assert (made[0].http_address, made[0].grpc_address) == ("127.0.0.1:8000", "127.0.0.1:50051")
    assert flag(made[0], "--served-model-name") == BUNDLED_NAME
    assert flag(made[3], "--model") == flag(made[1], "--model") is not None


def test_replicas_have_names_and_addresses_of_their_own() -> None:
    made = children(launch("--workers=3", "--gateways=2", "--port=9000", "--grpc-port=9100"), URL)
    assert len(made) == 8
    assert [child.http_address for child in made[:2]] == ["127.0.0.1:9000", "127.0.0.1:9001"]
    assert [child.grpc_address for child in made[:2]] == ["127.0.0.1:9100", "127.0.0.1:9101"]
    assert len({child.name for child in made}) == len({flag(child, "--name") for child in made}) == 8
    addresses = [flag(child, name) for child in made for name in ("--grpc-address", "--metrics-address")]
    assert len(set(addresses)) == 16


def test_workers_may_run_elsewhere() -> None:
    made = children(launch("--workers=0"), URL)
    assert SessionKind.WORKER not in {child.kind for child in made}
    assert flag(made[0], "--served-model-name") == BUNDLED_NAME, "requests are taken, and wait"


def test_a_file_of_pools_says_itself_what_models_are_called() -> None:
    for asked in (launch("--pools=/etc/pools"), launch(PENSTOCK_POOLS="/etc/pools")):
        assert flag(children(asked, URL)[0], "--served-model-name") is None
    made = children(launch("--pools=/etc/pools", "--served-model-name=mine"), URL)
    assert flag(made[0], "--pools") == "/etc/pools"
    assert flag(made[0], "--served-model-name") == "mine", "which the gateway refuses"


def test_a_flag_goes_to_every_service_that_has_it_and_to_no_other() -> None:
    made = children(
        launch("--plans-in-flight=4", "--block-size=8", "--no-enable-prefix-caching", "--num-shards=2"), URL
    )
    told = {child.kind: child.flags for child in made}
    assert "--plans-in-flight=4" in told[SessionKind.SCHEDULER]
    assert "--no-enable-prefix-caching" in told[SessionKind.SCHEDULER]
    assert "--block-size=8" in told[SessionKind.WORKER]
    assert "--block-size=8" not in told[SessionKind.SCHEDULER]
    assert all("--num-shards=2" in flags for flags in told.values())


def test_ranks_of_a_worker_share_its_name_and_meet_at_one_place() -> None:
    made = [
        child
        for child in children(launch("--workers=2", "--tensor-parallel-size=2"), URL)
        if child.kind.value == "worker"
    ]
    assert [child.name for child in made] == ["worker-0.0", "worker-0.1", "worker-1.0", "worker-1.1"]
    assert [flag(child, "--name") for child in made] == ["worker-0", "worker-0", "worker-1", "worker-1"]
    assert [flag(child, "--rank") for child in made] == ["0", "1", "0", "1"]
    meetings = [flag(child, "--distributed-address") for child in made]
    assert meetings[0] == meetings[1] != meetings[2] == meetings[3]


def test_names_are_unique_in_a_pool_that_others_share() -> None:
    (name,) = {flag(child, "--name") for child in children(launch("--redis-url=redis://h:1"), "redis://h:1")[:1]}
    assert name is not None
    assert name.endswith("-gateway-0")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--workres=2"], "--workres"),
        (["--gateways=0"], "--gateways='0'"),
        (["--port=70000"], "--port='70000'"),
        (["--block-size=some"], "--block-size='some'"),
        (["--drain-timeout-s=-1"], "--drain-timeout-s='-1'"),
        (["--name=x"], "--name"),
        (["more"], "more"),
    ],
)
def test_an_unknown_or_malformed_flag_is_named(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        launch(*argv)
    assert end.value.code == 2
    assert named in capsys.readouterr().err


def test_the_environment_reaches_what_the_launcher_itself_decides_by_default() -> None:
    asked = launch(PENSTOCK_DRAIN_TIMEOUT_S="3", PENSTOCK_LOG_FORMAT="json", PENSTOCK_SERVED_MODEL_NAME="mine")
    assert (asked.drain_timeout_s, asked.log_format) == (3.0, "json")
    assert flag(children(asked, URL)[0], "--served-model-name") == "mine"


def test_help_shows_the_flags_of_all_services(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch("--help")
    shown = capsys.readouterr().out
    for name in (
        "--model",
        "--redis-url",
        "--workers",
        "--plans-in-flight",
        "--step-ms",
        "--max-body-bytes",
        "--result-ttl-s",
    ):
        assert name in shown


def test_a_wildcard_is_called_on_this_machine() -> None:
    assert callable_address("0.0.0.0:8000") == "127.0.0.1:8000"
    assert callable_address("[::]:8000") == "127.0.0.1:8000"
    assert callable_address("10.1.2.3:8000") == "10.1.2.3:8000"
    assert children(launch("--host=::1"), URL)[0].http_address == "[::1]:8000"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no service could listen on a port that is held")
def test_ports_that_are_held_are_found_by_nobody_else_and_services_listen_there() -> None:
    made = children(launch("--port=0", "--grpc-port=0"), URL)
    held = {int(child.grpc_address.rpartition(":")[2]) for child in made}
    with hold_ports(made):
        assert not held & set(free_ports(50))
        for port in held:
            socket.create_server(("127.0.0.1", port)).close()
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("127.0.0.1", min(held)))
    assert held & set(free_ports(50))


def test_the_servers_url_may_come_from_the_environment_and_its_password_from_a_file(tmp_path: Path) -> None:
    assert parse([], {"PENSTOCK_REDIS_URL": "redis://u:p@h:1/2"}).redis_url == "redis://u:p@h:1/2"
    assert parse(["--redis-url=redis://other"], {"PENSTOCK_REDIS_URL": "redis://h"}).redis_url == "redis://other"
    assert parse([], {}).redis_url is None
    secret = tmp_path / "password"
    secret.write_text("s3cr:et/\n")
    asked = parse(["--redis-url=rediss://u@h:1/2?ssl_cert_reqs=none", f"--redis-password-file={secret}"], {})
    assert asked.redis_url == f"rediss://u@h:1/2?ssl_cert_reqs=none&password_file={secret}"
    assert "s3cr" not in repr(asked)
    assert "s3cr" not in repr(children(asked, asked.redis_url))
    with pytest.raises(PenstockError, match="redis_password_file cannot be read"):
        parse(["--redis-url=redis://h", f"--redis-password-file={tmp_path / 'none'}"], {})


def test_inner_ports_begin_where_the_flag_says_and_stay_the_same() -> None:
    first, again = (children(launch("--first-port=21000", "--workers=2"), URL) for _ in range(2))
    assert first == again
    inner = [
        int(address.rpartition(":")[2])
        for child in first
        for address in (child.grpc_address, child.metrics_address, child.health_address)
        if address != first[0].grpc_address
    ]
    assert len(set(inner)) == len(inner) == 17
    assert min(inner) >= 21000
    assert max(inner) < 21000 + 24
    with pytest.raises(PenstockError, match="--first-port may be at most"):
        children(launch("--first-port=65530"), URL)


def test_a_file_of_flags_counts_for_less_than_flags_and_for_more_than_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("workers: 2\nport: 9000\nmax-model-len: 512\nenable-prefix-caching: false\n", "utf-8")
    made = children(launch(f"--config={path}", "--port=9500", PENSTOCK_MAX_MODEL_LEN="64"), URL)
    by_kind = {child.kind: child for child in made}
    assert len(made) == 6
    assert by_kind[SessionKind.GATEWAY].http_address == "127.0.0.1:9500"
    assert flag(by_kind[SessionKind.WORKER], "--max-model-len") == "512"
    assert "--no-enable-prefix-caching" in by_kind[SessionKind.SCHEDULER].flags


def test_a_file_with_a_flag_that_nobody_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("wrokers: 2\n", "utf-8")
    with pytest.raises(SystemExit):
        launch(f"--config={path}")
    assert "there is no flag --wrokers: did you mean workers?" in capsys.readouterr().err
