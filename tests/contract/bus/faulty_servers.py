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

from penstock.launcher.layout import free_ports
from servicekit.bus.embedded import find_server

LIMIT_S = 60.0


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

    def close(self) -> None:
        self._listener.close()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

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
    folder.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    command = [
        str(program or find_server()),
        *_config_first(folder, options),
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
    ]
    process = subprocess.Popen([*command, "--dir", str(folder), "--logfile", str(folder / "log"), "--save", ""])
    try:
        until(lambda: _answers(port), f"a server at port {port}")
        yield port
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _config_first(folder: Path, options: tuple[str, ...]) -> list[str]:
    """A sentinel needs a file that it may write to."""
    if "--sentinel" not in options:
        return list(options)
    config = folder / "sentinel.conf"
    config.write_text("".join(f"{each}\n" for each in options if each != "--sentinel"))
    return [str(config), "--sentinel"]


def _answers(port: int) -> bool:
    try:
        return ask(f"redis://127.0.0.1:{port}", "PING") == "PONG"
    except (OSError, TypeError):
        return False
