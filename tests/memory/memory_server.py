"""A Redis server in memory, with all that the bus needs of one: its commands, and its functions in Lua."""

from collections.abc import Callable, Sequence

from memory_commands import Hashes, Keys, Sets, SortedSets
from memory_functions import Functions
from memory_store import Reply, Store
from memory_stream_commands import Streams


class MemoryServer:
    """Carries out one command after the other. Not locked, and nothing waits: `BLOCK` is passed over.

    Commands may be given only in the forms in which the bus gives them.
    """

    def __init__(self, store: Store, run_id: str = "0") -> None:
        self.run_id = run_id
        self.store = store
        self._functions = Functions(self.execute)
        self._streams = Streams(self.store)
        groups = [*(group(self.store) for group in (Keys, Hashes, Sets, SortedSets)), self._streams]
        self._commands: dict[bytes, Callable[..., Reply]] = {
            name.rstrip("_").upper().encode(): getattr(group, name)
            for group in groups
            for name in dir(group)
            if callable(getattr(group, name)) and not name.startswith("_")
        }
        self._commands |= {b"TIME": self._time, b"INFO": self._info, b"FUNCTION": self._load, b"FCALL": self._run}

    def execute(self, command: Sequence[bytes]) -> Reply:
        """The reply to a command.

        Raises:
            ReplyError: it is refused.
        """
        return self._commands[command[0]](*command[1:])

    def take_appended(self) -> set[bytes]:
        """The streams that got entries since this was asked last."""
        appended, self._streams.appended = self._streams.appended, set()
        return appended

    def _time(self) -> Reply:
        seconds, milliseconds = divmod(self.store.now_ms(), 1000)
        return [b"%d" % seconds, b"%d" % (1000 * milliseconds)]

    def _info(self, *_: bytes) -> Reply:
        fields = {"run_id": self.run_id, "used_memory": 0, "maxmemory": 0, "maxmemory_policy": "noeviction"}
        return "".join(f"{name}:{value}\r\n" for name, value in fields.items()).encode()

    def _load(self, _: bytes, *words: bytes) -> Reply:
        self._functions.load(words[-1])
        return "OK"

    def _run(self, name: bytes, num_keys: bytes, *words: bytes) -> Reply:
        keys, args = words[: int(num_keys)], words[int(num_keys) :]
        return self._functions.run(name, list(keys), list(args))
