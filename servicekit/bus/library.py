"""The server-side function library: the files of `functions/` with the names and caps of `keys.py` filled in."""

import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files

from servicekit.bus import keys

# Each uses what stands before it.
_FILES = ("basics", "sessions", "waiting", "limits", "traces", "requests", "checkpoints", "workers", "register")


@dataclass(frozen=True, slots=True)
class Library:
    """One version of the functions. Its version is a hash of its text, so that several may live on one server."""

    version: str
    source: bytes

    @property
    def name(self) -> bytes:
        """The library's name on the server."""
        return b"penstock_" + self.version.encode()

    def function(self, name: str) -> bytes:
        """A function's name on the server."""
        return f"{name}_{self.version}".encode()


def _fill_in(word: re.Match[str]) -> str:
    """A key's name where the word is in small letters; in capitals a field's name, a cap or another constant."""
    value = getattr(keys.Names, word[1].upper()) if word[1].islower() else getattr(keys, word[1])
    return value.decode() if isinstance(value, bytes) else str(value)


def read_library() -> Library:
    """The library that belongs to this version of the code."""
    folder = files("servicekit.bus").joinpath("functions")
    template = "\n".join(folder.joinpath(f"{name}.lua").read_text(encoding="utf-8") for name in _FILES)
    source = re.sub(r"@(?!VERSION@)([A-Z_]+|[a-z_]+)@", _fill_in, template)
    version = hashlib.sha256(source.encode()).hexdigest()[:12]
    library = f"#!lua name=penstock_{version}\n" + source.replace("@VERSION@", version)
    return Library(version, library.encode())
