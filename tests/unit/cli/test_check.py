"""`penstock check`: it says what `penstock serve` with the same flags would stumble over."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from penstock.cli.check import main
from servicekit.bus.embedded import EmbeddedServer
from servicekit.bus.probe import ask, find_address, read_info
from tools.bundled_model.quantize import BUNDLED, quantize_checkpoint

SIMULATED = ("--runner=simulated", "--port=0", "--grpc-port=0")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedServer(tmp_path_factory.mktemp("check"))
    server.start()
    yield server.url
    server.close()


def findings(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, list[str]]:
    """The exit status, and the lines of what was found."""
    status = main(flags)
    return status, capsys.readouterr().out.partition("\n\n")[0].splitlines()


def test_a_pipeline_that_would_start_is_shown(capsys: pytest.CaptureFixture[str], server: str) -> None:
    assert main([*SIMULATED, f"--redis-url={server}", "--workers=2"]) == 0
    found, _, processes = capsys.readouterr().out.partition("\n\nwould run\n")
    assert all(line.startswith("ok ") for line in found.splitlines())
    assert "6 processes: 1 gateway, 1 tokenizer, 1 scheduler, 2 workers, 1 detokenizer" in found
    assert "has Penstock's functions; 0 processes are in the pool 'penstock'" in found
    assert sum("python -m worker_svc" in line for line in processes.splitlines()) == 2
    assert server not in processes, "it may hold a password"


def test_the_bundled_model_is_looked_at_as_a_worker_would(capsys: pytest.CaptureFixture[str], server: str) -> None:
    status, found = findings(capsys, "--port=0", "--grpc-port=0", f"--redis-url={server}", "--device=cpu")
    assert status == 0
    assert any("Qwen3ForCausalLM, 6 layers" in line and "MB of weights" in line for line in found)
    assert any(line.startswith("ok") and "torch" in line for line in found)


def test_a_quantized_checkpoint_is_told_with_the_memory_that_it_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, server: str
) -> None:
    quantize_checkpoint("awq", tmp_path)
    flags = ("--port=0", "--grpc-port=0", f"--redis-url={server}", f"--model={tmp_path}", "--device=cpu")
    status, found = findings(capsys, *flags)
    assert status == 0
    (line,) = (each for each in found if "Qwen3ForCausalLM" in each)
    bytes_of_floats = sum(tensor.numel() for tensor in load_file(BUNDLED / "model.safetensors").values()) * 4
    assert f"MB of weights (awq; {bytes_of_floats / 1e6:.1f} MB in the memory of each rank)" in line


def test_all_that_is_wrong_is_told_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("no key\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        flags = (f"--model={tmp_path}/none", f"--api-keys-file={keys}", "--redis-url=redis://127.0.0.1:1")
        status, found = findings(capsys, "--runner=simulated", f"--port={port}", "--grpc-port=0", *flags)
    wrong = {line.split()[1]: line for line in found if line.startswith("wrong")}
    assert status == 2
    assert wrong.keys() == {"api", "model", "redis", "ports"}
    assert f"{tmp_path}/none does not exist" in wrong["model"]
    assert f"127.0.0.1:{port}" in wrong["ports"]
    assert str(keys) in wrong["api"]


def test_the_file_of_pools_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path, server: str) -> None:
    pools = tmp_path / "pools.jsonl"
    pools.write_text('{"name": "chat"}\n{"name": "code", "redis_url": "redis://code:6379/0"}\n')
    flags = (*SIMULATED, f"--redis-url={server}", f"--pools={pools}")
    status, found = findings(capsys, *flags)
    assert status == 0
    (line,) = (each for each in found if each.split()[1] == "pools")
    assert line.split(maxsplit=2) == ["ok", "pools", f"{pools}: chat, code"]
    pools.write_text('{"name": "chat"}\n{"name": "code", "weight": 1}\n')
    status, found = findings(capsys, *flags)
    assert status == 2
    (line,) = (each for each in found if each.split()[1] == "pools")
    assert line.startswith("wrong")
    assert str(pools) in line
    assert "weight" in line


def test_a_file_of_pools_that_is_not_there_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, server: str
) -> None:
    missing = tmp_path / "pools.jsonl"
    status, found = findings(capsys, *SIMULATED, f"--redis-url={server}", f"--pools={missing}")
    assert status == 2
    (line,) = (each for each in found if each.startswith("wrong"))
    assert line.split()[1] == "pools"
    assert str(missing) in line


def test_a_checkpoint_without_weights_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path, server: str) -> None:
    bundled = Path(__file__).parents[3] / "penstock" / "bundled_model"
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((bundled / name).read_bytes())
    status, found = findings(capsys, "--port=0", "--grpc-port=0", f"--redis-url={server}", f"--model={tmp_path}")
    assert status == 2
    assert any(line.startswith("wrong") and "model.safetensors is missing" in line for line in found)


def test_a_server_that_may_drop_keys_is_told(capsys: pytest.CaptureFixture[str], server: str) -> None:
    address = find_address(server)
    ask(address, [("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")])
    try:
        status, found = findings(capsys, *SIMULATED, f"--redis-url={server}")
    finally:
        ask(address, [("CONFIG", "SET", "maxmemory-policy", "noeviction")])
    assert status == 2
    assert any(line.startswith("wrong") and "set it to noeviction" in line for line in found)
    assert read_info(ask(address, [("INFO", "memory")])[0])["maxmemory_policy"] == "noeviction"


def test_a_server_that_keeps_nothing_is_a_warning(capsys: pytest.CaptureFixture[str], server: str) -> None:
    address = find_address(server)
    ask(address, [("CONFIG", "SET", "appendonly", "no")])
    try:
        status, found = findings(capsys, *SIMULATED, f"--redis-url={server}")
    finally:
        ask(address, [("CONFIG", "SET", "appendonly", "yes")])
    assert status == 0
    assert any(line.startswith("warning") and "appendonly is off" in line for line in found)
