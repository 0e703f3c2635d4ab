"""The file of pools: read at the start, and again whenever it changes."""

import os
from pathlib import Path

import structlog

from contract.domain.errors import ErrorCode, PenstockError
from gateway_svc.core.pool_entries import PoolEntry, parse_pools
from gateway_svc.core.stats import GatewayStats
from gateway_svc.keys_file import REMIND_S, Version, version_of
from servicekit.reminder import Reminder

_logger = structlog.stdlib.get_logger(__name__)


class PoolsFile:
    """Reads the entries. Blocks for as long as the file system does.

    A file that is wrong, empty or gone changes nothing: the pools from before stay, and that is said again and again.
    """

    def __init__(self, path: Path, stats: GatewayStats) -> None:
        self._path = path
        self._stats = stats
        self._seen: Version | None = None  # the file that was read last; None: it could not be
        self._trouble = ""  # why the last version is of no use
        self._reminder = Reminder(REMIND_S)

    def read(self) -> tuple[PoolEntry, ...]:
        """The pools, the first one first.

        Raises:
            PenstockError: INTERNAL (the operator's fault): the file cannot be read, or is wrong.
        """
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
            return parse_pools(content)
        except ValueError as error:
            raise self._broken(str(error)) from error

    def read_if_changed(self) -> tuple[PoolEntry, ...] | None:
        """The pools if the file is another one than at the last look; None: it is not, or it is wrong."""
        try:
            if self._seen is not None and version_of(self._path.stat()) == self._seen:
                self._remind()
                return None
        except OSError:
            self._seen = None  # `read` says why
        try:
            return self.read()
        except PenstockError as error:
            self.refuse(error)
            return None

    def accept(self) -> None:
        """The version that was read last is in use."""
        self._trouble = ""
        self._stats.num_pool_reloads += 1

    def refuse(self, error: PenstockError) -> None:
        """The version that was read last is of no use."""
        if error.message != self._trouble:
            self._stats.num_broken_pool_reloads += 1
            self._trouble, self._reminder = error.message, Reminder(REMIND_S)
        self._remind()

    def _remind(self) -> None:
        if self._trouble and self._reminder.is_due():
            _logger.error("the pools from before stay: %s", self._trouble)

    def _broken(self, why: str) -> PenstockError:
        return PenstockError(ErrorCode.INTERNAL, f"the file of pools {self._path} cannot be used: {why}")
