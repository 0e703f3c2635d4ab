"""The embedded server: it comes up, keeps its data, says why it cannot, and never outlives its parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from bus_flow import write_everything

from contract.domain.errors import Fault, PenstockError
from servicekit.bus import embedded, open_bus
from servicekit.bus.calls import Append, Length
from servicekit.bus.embedded import EmbeddedServer, find_server


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.parametrize("port", [None, 0])
def test_data_outlasts_a_stop_and_a_kill(tmp_path: Path, port: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_S", 300.0)
    server = EmbeddedServer(tmp_path / "data", port=port)
    server.start()
    server.start()
    url, first_pid = server.url, server.pid
    for number in range(3):
        connection = open_bus(url).connect()
        connection.call(Append(b"s", {b"n": b"1"}))
        assert connection.call(Length(b"s")) == number + 1
        connection.close()
        if number == 0:
            server.stop()
            assert server.exit_code() == 0
        else:
            assert server.pid is not None
            write_everything(url)
            os.kill(server.pid, signal.SIGKILL)
            while server.exit_code() is None:
                time.sleep(0.005)
            assert server.exit_code() == -signal.SIGKILL
        server.start()
        assert server.exit_code() is None
        assert (server.url, server.pid == first_pid) == (url, False)
    server.close()
    server.close()


def test_a_path_too_long_for_a_socket_is_worked_around(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / ("d" * 120))
    server.start()
    connection = open_bus(server.url).connect()
    assert connection.call(Length(b"s")) == 0
    connection.close()
    socket_path = Path(server.url.removeprefix("unix://"))
    server.close()
    assert not socket_path.parent.exists()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "data", port=0)
    server.start()
    second = EmbeddedServer(tmp_path / "other", port=int(server.url.rpartition(":")[2]), maxmemory="nonsense")
    with pytest.raises(PenstockError, match="already answers") as refused:
        second.start()
    assert refused.value.fault is Fault.OPERATOR
    server.close()
    with pytest.raises(PenstockError, match="did not start") as refused:
        second.start()
    assert refused.value.fault is Fault.OPERATOR


def test_a_missing_server_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PenstockError, match="install") as refused:
        find_server()
    assert refused.value.fault is Fault.OPERATOR
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert find_server() == program


def test_the_server_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "data")
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    assert server.pid is not None
    connection = open_bus(server.url).connect()
    assert [connection.call(Append(b"s", {b"n": b"1"})) and connection.call(Length(b"s")) for _ in range(50)][-1] == 50
    connection.close()
    assert _is_running(server.pid)
    server.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_the_server_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path; from servicekit.bus.embedded import EmbeddedServer\n"
            "server = EmbeddedServer(Path(sys.argv[1])); server.start()\n"
            "print(server.pid, flush=True); time.sleep(600)",
            str(tmp_path / "data"),
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(embedded.__file__).parents[2],
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert _is_running(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    while _is_running(pid):
        time.sleep(0.01)
