"""A server of the bench's own with a proxy before it: services reach it through that alone."""

import threading
from collections.abc import Callable
from pathlib import Path

from bench.rig.chaos.proxy import Proxy
from servicekit.bus.embedded import EmbeddedServer

_LOOK_S = 0.2


class KeptServer:
    """Starts the server again when it died, as the launcher does with its own."""

    def __init__(self, data_dir: Path, say: Callable[[str], None]) -> None:
        """Runs when this returns; `say` is told of each start, in the launcher's words."""
        self._server = EmbeddedServer(data_dir)
        self._say = say
        self._stopping = threading.Event()
        self._start()
        path = Path(self._server.url.removeprefix("unix://"))
        self.proxy = Proxy(path.with_name("proxy.sock"), path)
        self._thread = threading.Thread(target=self._keep, name="kept-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends both."""
        self._stopping.set()
        self._thread.join()
        self.proxy.close()
        self._server.close()

    def _start(self) -> None:
        self._server.start()
        self._say(f"server started (pid {self._server.pid}) at {self._server.url}")

    def _keep(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            if self._server.exit_code() is not None:
                self._start()
