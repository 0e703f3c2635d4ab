"""Secrets of operators that stand in files: who has one may control a service, or read its metrics."""

import hmac
import os
from pathlib import Path

import structlog

from contract.domain.errors import ErrorCode, PenstockError

MIN_CHARS = 16
_logger = structlog.stdlib.get_logger(__name__)


class TokenFile:
    """A token, read again whenever its file is another one; what cannot be read lets nobody in."""

    def __init__(self, path: Path, flag: str) -> None:
        """Reads it.

        Raises:
            PenstockError: INTERNAL (the operator's fault): it cannot be read, or is too short to be a secret.
        """
        self._path = path
        self._flag = flag
        self._seen: tuple[int, ...] = ()
        self._token = b""
        self._read()

    def admits(self, given: str | None) -> bool:
        """Return whether somebody who gives this, or nothing, has the token."""
        try:
            self._read()
        except PenstockError as error:
            if self._token:
                _logger.error("%s; nobody is let in", error.message)  # noqa: TRY400  (it is no defect)
            self._token, self._seen = b"", ()
        return bool(self._token) and given is not None and hmac.compare_digest(given.encode(), self._token)

    def read(self) -> str:
        """The token, to show to who asks for it.

        Raises:
            PenstockError: INTERNAL (the operator's fault): it cannot be read.
        """
        self._read()
        return self._token.decode("ascii")

    def _read(self) -> None:
        try:
            status = self._path.stat()
            version = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
            if version == self._seen:
                return
            token = self._path.read_bytes().strip()
        except OSError as error:
            raise self._broken(error.strerror or type(error).__name__) from error
        if len(token) < MIN_CHARS or not token.isascii() or b"\n" in token:
            raise self._broken(f"it must hold one line of at least {MIN_CHARS} ASCII characters")
        self._token, self._seen = token, version

    def _broken(self, why: str) -> PenstockError:
        return PenstockError(ErrorCode.INTERNAL, f"{self._flag} {self._path} cannot be used: {why}")


def open_token(path: Path | None, flag: str) -> TokenFile | None:
    """The token of a setting; None: none is asked for.

    Raises:
        PenstockError: INTERNAL (the operator's fault): it cannot be used.
    """
    return None if path is None else TokenFile(path, flag)


def write_token(path: Path, token: str) -> None:
    """A file of its own that nobody else on this machine may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
