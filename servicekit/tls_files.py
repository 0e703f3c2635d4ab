"""The certificate of a server, and the authority that signs those of its clients."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files."""

    cert: Path  # the server's chain, its own certificate first
    key: Path
    client_ca: Path | None = None  # who must have signed a client's certificate; None: clients need none

    @property
    def paths(self) -> tuple[Path, ...]:
        """All of them."""
        return (self.cert, self.key, *([self.client_ca] if self.client_ca else []))
