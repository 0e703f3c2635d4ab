"""The file of API keys: read at the start, and again whenever it changes."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import structlog

from contract.domain.errors import ErrorCode, PenstockError
from gateway_svc.core.auth import Caller, parse_keys
from gateway_svc.core.stats import GatewayStats

CHECK_S = 1.0  # between two looks at the file
REMIND_S = 60.0  # between two reports of the same trouble
Version: TypeAlias = tuple[int, ...]
_STILL_VALID = "the API keys from before stay valid"
_logger = structlog.stdlib.get_logger(__name__)


class KeysFile:
    """Reads the keys. Blocks for as long as the file system does.

    A file without a key means nobody. So does, after a while, a file that is gone: who replaces a file may take it away
    first. A file that is wrong means nothing: the keys from before stay valid, and that is said again and again.
    """

    def __init__(self, path: Path, stats: GatewayStats, gone_s: float) -> None:
        """`gone_s`: for so long the keys of a file that is gone stay valid."""
        self._path = path
        self._stats = stats
        self._gone_s = gone_s
        self._seen: Version | None = None  # the file that was read last; None: it could not be
        self._emptied: Version | None = None  # a file without a key, at the look before
        self._gone_since_s: float | None = None
        self._has_revoked = False  # as the file was gone for too long
        self._trouble: tuple[Version | None, str] | None = None  # what was logged last, and of what
        self._told_s = 0.0

    def read(self) -> Mapping[bytes, Caller]:
        """The callers by the SHA-256 of their key, for a gateway that starts.

        Raises:
            PenstockError: INTERNAL (the operator's fault): the file cannot be read, or is wrong.
        """
        callers = self._read()
        if not callers:
            _logger.warning("the API keys file has no key: nobody may call", path=str(self._path))
        self._stats.num_key_reloads += 1
        return callers

    def read_if_changed(self, now_s: float) -> Mapping[bytes, Caller] | None:
        """The callers if the file is another one than at the last look, at a time of a monotonic clock.

        None: the keys from before stay valid: it is the same, or there is trouble, which is logged.
        """
        try:
            found = version_of(self._path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return self._gone(now_s)
        except OSError:
            found = None  # `_read` says why
        self._gone_since_s, self._has_revoked = None, False
        if found == self._seen and found is not None:
            if self._trouble is not None:
                self._tell(*self._trouble, now_s, _STILL_VALID)
            return None
        try:
            callers = self._read()
        except PenstockError as error:
            self._tell(found, error.message, now_s, _STILL_VALID)
            return None
        if not callers and self._emptied != self._seen:
            # Who writes into a file empties it first: it counts if it is still so at the next look.
            self._emptied, self._seen = self._seen, None
            return None
        self._trouble = self._emptied = None
        self._stats.num_key_reloads += 1
        if callers:
            _logger.info("API keys were read again", num_keys=len(callers))
        else:
            _logger.warning("the API keys file has no key any more: nobody may call", path=str(self._path))
        return callers

    def _gone(self, now_s: float) -> Mapping[bytes, Caller] | None:
        self._seen = self._emptied = None
        if self._gone_since_s is None:
            self._gone_since_s = now_s
        left_s = self._gone_s - (now_s - self._gone_since_s)
        if left_s > 0:
            self._tell(None, "there is no such file", now_s, f"the API keys stay valid for {self._gone_s:g} s at most")
            return None
        if self._has_revoked:
            return None
        self._has_revoked, self._trouble = True, None
        _logger.error("the API keys file is gone: nobody may call", path=str(self._path), seconds=self._gone_s)
        self._stats.num_key_reloads += 1
        return {}

    def _read(self) -> Mapping[bytes, Caller]:
        try:
            with self._path.open("rb") as file:
                # Before it is read: a change from now on is a change.
                version = version_of(os.fstat(file.fileno()))
                content = file.read()
        except OSError as error:
            self._seen = None
            raise self._broken(error.strerror or type(error).__name__) from error
        self._seen = version
        try:
            return parse_keys(content)
        except ValueError as error:
            raise self._broken(str(error)) from error

    def _tell(self, found: Version | None, why: str, now_s: float, what: str) -> None:
        is_new = self._trouble != (found, why)
        if is_new or now_s - self._told_s >= REMIND_S:
            self._trouble, self._told_s = (found, why), now_s
            self._stats.num_broken_key_reloads += is_new
            _logger.error(what, path=str(self._path), why=why)

    def _broken(self, why: str) -> PenstockError:
        return PenstockError(ErrorCode.INTERNAL, f"the API keys file {self._path} cannot be used: {why}")


def version_of(status: os.stat_result) -> Version:
    """A mark that is another after each change of a file."""
    # With the time of the last change of owner and mode: a file that could not be read may be readable now.
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size
