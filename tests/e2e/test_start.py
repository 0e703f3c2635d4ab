"""What keeps a pipeline from starting, and what it waits for."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from served import LONG_LEASES, ROOT, SERVER, SIMULATED, Served, wait_until

from contract.domain.params import SamplingParams
from penstock.client import Client
from penstock.launcher.ports import free_ports
from servicekit.bus.embedded import EmbeddedServer

PARAMS = SamplingParams(temperature=0, max_tokens=4)


def refused(*flags: str) -> str:
    command = [sys.executable, "-m", "penstock.cli", "serve", "--port=0", "--grpc-port=0", *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    return ended.stderr


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path}/none: there is no such directory" in refused(f"--model={tmp_path}/none")


@pytest.mark.parametrize("model", ["./nope", "../nope", "~/nope", "nope/", "some/where/nope", "README.md"])
def test_a_path_that_is_no_directory_is_found_before_anything_starts(model: str) -> None:
    said = refused(f"--model={model}")
    assert f"--model {model}: there is no such directory" in said
    assert "started" not in said


def test_data_cannot_be_kept_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = refused(f"--data-dir={tmp_path}/file/data")
    assert f"the server's data cannot be kept in {tmp_path}/file/data" in said
    assert "Not a directory" in said


def test_a_value_that_is_none_of_several_is_told_which_there_are() -> None:
    assert "--scheduling-policy='best': choose one of fcfs, priority, fair" in refused("--scheduling-policy=best")


def test_a_directory_without_a_checkpoint_stops_the_start_with_a_reason(tmp_path: Path) -> None:
    said = refused(f"--model={tmp_path}", "--runner=model")
    assert "cannot start" in said
    assert str(tmp_path) in said


def test_services_wait_for_their_server_and_say_so_and_start_when_it_comes(checkpoint: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with Served(tmp_path, f"--model={checkpoint}", f"--redis-url=redis://127.0.0.1:{port}", *SIMULATED) as served:
        for name in ("gateway", "tokenizer", "scheduler", "worker", "detokenizer"):
            wait_until(lambda name=name: is_waiting(served, name), f"{name} waits")  # type: ignore[misc]
        wait_until(lambda: "waiting for gateway-0" in served.err, "the launcher says whom it waits for")
        assert served.process.poll() is None
        server = EmbeddedServer(tmp_path / "data", port=port)
        server.start()
        try:
            with served.wait_ready().client() as client:
                assert len(client.complete("abc", PARAMS).outputs[0].token_ids) == 4
            served.process.terminate()
            assert served.process.wait(300) == 0
        finally:
            server.close()


def is_waiting(served: Served, name: str) -> bool:
    lines = [line for line in served.err.splitlines() if f"{name}-0 |" in line]
    return any("waiting" in line for line in lines)


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server on PATH")
def test_debians_redis_does_as_well(checkpoint: Path, tmp_path: Path) -> None:
    program = shutil.which("redis-server")
    assert program is not None
    server = EmbeddedServer(tmp_path / "data", port=0, server=Path(program))
    server.start()
    try:
        with (
            Served(tmp_path, f"--model={checkpoint}", f"--redis-url={server.url}", *SIMULATED) as served,
            served.wait_ready().client() as client,
        ):
            assert len(client.complete("abc", PARAMS).outputs[0].token_ids) == 4
    finally:
        server.close()


def test_two_pipelines_of_several_replicas_share_a_server_but_no_pool(checkpoint: Path, tmp_path: Path) -> None:
    replicas = ("--gateways=2", "--tokenizers=2", "--schedulers=2", "--workers=2", "--detokenizers=2")
    server = EmbeddedServer(tmp_path / "data", port=0)
    server.start()
    try:
        folders = [tmp_path / name for name in ("a", "b")]
        for folder in folders:
            folder.mkdir()
        flags = (f"--model={checkpoint}", f"--redis-url={server.url}", LONG_LEASES, *SIMULATED)
        with (
            Served(folders[0], "--pool=a", *flags, *replicas) as first,
            Served(folders[1], "--pool=b", *flags) as second,
        ):
            first.wait_ready(), second.wait_ready()
            assert len(first.pids()) == 10
            assert SERVER not in first.pids()
            for address in (first.grpc_address, second.grpc_address):
                with Client(address) as client:
                    assert len(client.complete("abc", PARAMS).outputs[0].token_ids) == 4
            with second.client() as client:
                assert {session.kind for session in client.pipeline().sessions} == {
                    "gateway", "tokenizer", "scheduler", "worker", "detokenizer",
                }  # fmt: skip
                assert len(client.pipeline().sessions) == 5
    finally:
        server.close()


def test_a_port_that_is_taken_is_named_before_anything_starts(simulated: Served, checkpoint: Path) -> None:
    for flag, address in (("--port", simulated.http_url), ("--grpc-port", simulated.grpc_address)):
        said = refused(f"--model={checkpoint}", f"{flag}={address.rpartition(':')[2]}", *SIMULATED)
        assert f"choose another {flag}" in said
        assert "gateway-0 started" not in said


def test_a_pipeline_that_still_waits_ends_as_well_as_one_that_serves(checkpoint: Path, tmp_path: Path) -> None:
    with Served(tmp_path, f"--model={checkpoint}", "--redis-url=redis://127.0.0.1:1", *SIMULATED) as served:
        wait_until(lambda: is_waiting(served, "worker"), "waits")
        served.process.terminate()
        assert served.process.wait(300) == 0
