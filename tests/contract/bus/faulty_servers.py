"""Servers and ways to them that go wrong: half-open connections, replicas, sentinels, clusters."""

import contextlib
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bus_flow import ask

from penstock.launcher.ports import free_ports
from servicekit.bus.embedded import find_server

LIMIT_S = 180.0


def until(condition: Callable[[], object], what: str) -> None:
    """Waits for an event, for as long as a busy machine may take."""
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain for: {what}"
        time.sleep(0.02)


class Proxy:
    """A way to a server over TCP, which can stop forwarding without closing anything, and lead to another server."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_connections = 0
        self._open: list[socket.socket] = []
        self._silent: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def go_silent(self) -> None:
        """All connections of now stay open, and nothing comes through them any more."""
        self._silent.update(self._open)

    def hang_up(self) -> None:
        """All connections of now end."""
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self._listener.close()
        self.hang_up()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target_port))
                self.num_connections += 1
                self._open += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if source not in self._silent:
                    target.sendall(data)
            if source not in self._silent:
                target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def running(folder: Path, *options: str, program: Path | None = None) -> Iterator[int]:
    """A server of its own with options of its own; its port."""
    process, port = _started(folder, options, program or find_server())
    try:
        yield port
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _started(folder: Path, options: tuple[str, ...], program: Path) -> tuple["subprocess.Popen[bytes]", int]:
    """A server that answers. Somebody else may take its port first: then it ends, and the next one has another."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        port, bus_port = free_ports(2)
        command = [str(program), *_config_first(folder, options)]
        command += ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--logfile", str(folder / "log")]
        if "--cluster-enabled" in options:
            command += ["--cluster-port", str(bus_port)]
        process = subprocess.Popen([*command, "--save", ""])
        while process.poll() is None:
            if _pid(port) == process.pid:
                return process, port
            assert time.monotonic() < deadline_s, f"waited in vain for a server at port {port}"
            time.sleep(0.02)
        assert time.monotonic() < deadline_s, (folder / "log").read_text()
        shutil.rmtree(folder)


def _config_first(folder: Path, options: tuple[str, ...]) -> list[str]:
    """A sentinel needs a file that it may write to."""
    if "--sentinel" not in options:
        return list(options)
    config = folder / "sentinel.conf"
    config.write_text("".join(f"{each}\n" for each in options if each != "--sentinel"))
    return [str(config), "--sentinel"]


def _pid(port: int) -> int:
    """Of the server that answers there; 0: none does."""
    try:
        info = ask(f"redis://127.0.0.1:{port}", "INFO", "server")
    except (OSError, TypeError):
        return 0
    return next((int(line.partition(":")[2]) for line in info.splitlines() if line.startswith("process_id:")), 0)
