"""The operator is told which fields of bodies nobody knows, and not with every body."""

import asyncio
from collections.abc import Iterable

import structlog

EVERY_S = 60.0
MAX_NAMES = 20  # told at once; a body may have as many as it likes
MAX_CHARS = 64  # of a name
_logger = structlog.stdlib.get_logger(__name__)


class IgnoredFields:
    """Says at once what is new and then what else came, once a minute. Lives in one event loop."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._names: dict[str, None] = {}  # to be told, in the order in which they came
        self._num_bodies = 0
        self._timer: asyncio.TimerHandle | None = None

    def note(self, names: Iterable[str]) -> None:
        """A body had these fields."""
        self._num_bodies += 1
        for name in names:
            if len(self._names) < MAX_NAMES:
                self._names[name[:MAX_CHARS]] = None
        if self._timer is None:
            self._tell()

    def _tell(self) -> None:
        self._timer = None
        if not self._num_bodies:
            return
        _logger.warning(
            "fields that nobody knows were ignored; --strict-fields refuses them",
            fields=list(self._names),
            num_bodies=self._num_bodies,
        )
        self._names, self._num_bodies = {}, 0
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._tell)
