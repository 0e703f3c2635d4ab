"""The file of API keys: read at the start, and again whenever it changes."""

import os
from collections.abc import Mapping
from pathlib import Path

import structlog

from gateway_svc.core.auth import Caller, parse_keys
from gateway_svc.core.stats import GatewayStats
from penstock.domain.errors import ErrorCode, PenstockError

CHECK_S = 1.0  # between two looks at the file
_logger = structlog.stdlib.get_logger(__name__)


class KeysFile:
    """Reads the keys. Blocks for as long as the file system does."""

    def __init__(self, path: Path, stats: GatewayStats) -> None:
        self._path = path
        self._stats = stats
        self._seen: tuple[int, ...] | None = None  # the file that was read last; None: it could not be
        self._told: tuple[tuple[int, ...] | None, str] | None = None  # the last trouble that was logged, and of what

    def read(self) -> Mapping[bytes, Caller]:
        """The callers by the SHA-256 of their key.

        Raises:
            PenstockError: INTERNAL (the operator's fault): the file cannot be read, or is wrong.
        """
        try:
            with self._path.open("rb") as file:
                # Before it is read: a change from now on is a change.
                version = _version(os.fstat(file.fileno()))
                content = file.read()
        except OSError as error:
            self._seen = None
            raise self._broken(error.strerror or type(error).__name__) from error
        self._seen = version
        try:
            callers = parse_keys(content)
        except ValueError as error:
            raise self._broken(str(error)) from error
        self._stats.num_key_reloads += 1
        return callers

    def read_if_changed(self) -> Mapping[bytes, Caller] | None:
        """The callers if the file is another one than at the last look.

        None: it is the same, or it is broken, which is logged and counted once; the keys from before stay valid then.
        """
        try:
            found = _version(self._path.stat())
        except OSError:
            found = None  # `read` says why
        if found == self._seen:
            return None
        try:
            callers = self.read()
        except PenstockError as error:
            self._tell(found, error.message)
            return None
        self._told = None
        _logger.info("API keys were read again", num_keys=len(callers))
        return callers

    def _tell(self, found: tuple[int, ...] | None, why: str) -> None:
        if self._told != (found, why):
            self._told = (found, why)
            self._stats.num_broken_key_reloads += 1
            _logger.error("the API keys from before stay valid", why=why)

    def _broken(self, why: str) -> PenstockError:
        return PenstockError(ErrorCode.INTERNAL, f"the API keys file {self._path} cannot be used: {why}")


def _version(status: os.stat_result) -> tuple[int, ...]:
    # With the time of the last change of owner and mode: a file that could not be read may be readable now.
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size
