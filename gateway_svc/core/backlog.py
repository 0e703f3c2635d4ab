"""Rows that wait for a slow client: merged to one a sequence, and bounded."""

from contract.domain.rows import TextRow
from gateway_svc.core.streams import merge

ROW_BYTES = 300  # of an object that keeps a row, roughly
LOGPROB_BYTES = 100  # of one logprob or alternative


class Backlog:
    """Rows by choice, in the order in which their choices first came; holds about `max_bytes` and not much more."""

    __slots__ = ("_max_bytes", "_num_bytes", "_rows")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._rows: dict[int, list[TextRow]] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def num_bytes(self) -> int:
        """Roughly how much memory it takes."""
        return self._num_bytes

    @property
    def is_full(self) -> bool:
        """Return whether it takes no more rows."""
        return self._num_bytes >= self._max_bytes

    def add(self, choice: int, row: TextRow) -> None:
        """Keeps a row; the caller has looked at `is_full`."""
        self._rows.setdefault(choice, []).append(row)
        logprobs = sum(1 + len(logprob.top) for logprob in row.logprobs)
        self._num_bytes += ROW_BYTES + 4 * len(row.text) + 8 * len(row.token_ids) + LOGPROB_BYTES * logprobs

    def drain(self) -> list[tuple[int, TextRow]]:
        """All of it, one row for each choice, and empty again."""
        merged = [(choice, merge(rows)) for choice, rows in self._rows.items()]
        self._rows.clear()
        self._num_bytes = 0
        return merged
