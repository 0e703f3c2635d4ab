"""The effects of rows of the log: what is to be done, as values."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from contract.domain.finish import CancelReason
from contract.domain.rows import TextRow
from detokenizer_svc.core.live import LiveRequest
from detokenizer_svc.core.request import FinishedRequest
from detokenizer_svc.core.spans import Trace
from detokenizer_svc.core.textrows import TextRows


@dataclass(frozen=True, slots=True)
class Cancellation:
    """A sequence whose end is decided here, so that its scheduler need not go on with it."""

    request_id: bytes
    sequence: int
    reason: CancelReason = CancelReason.STOP


@dataclass(frozen=True)
class Retirement:
    """A request that has ended. Its end is among the texts; its result can be made when they are on their way."""

    request_id: bytes
    route: bytes  # who got the end
    request: LiveRequest

    @cached_property
    def result(self) -> FinishedRequest:
        """The result that is kept of the request."""
        return self.request.result()

    @property
    def trace(self) -> Trace:
        """Its trace, for a collector."""
        return self.result.trace(self.request.opened.asked)


@dataclass(slots=True)
class Effects:
    """All that is to be done after a change, in this order: texts, cancels, retirements, results."""

    texts: dict[bytes, TextRows] = field(default_factory=dict)  # by route
    retirements: list[Retirement] = field(default_factory=list)
    cancels: list[Cancellation] = field(default_factory=list)
    results: list[tuple[bytes, bytes]] = field(default_factory=list)  # routes whose text is the result of that request
    gaps: list[bytes] = field(default_factory=list)  # requests of which rows are missing before one that came

    def add(self, after: "Effects") -> None:
        """Take over effects that come after these."""
        for route, rows in after.texts.items():
            before = self.texts.get(route)
            self.texts[route] = rows if before is None else before.joined(rows)
        self.retirements += after.retirements
        self.cancels += after.cancels
        self.results += after.results
        self.gaps += after.gaps

    def rows(self) -> Iterator[TextRow]:
        """All text rows, whatever their route."""
        for rows in self.texts.values():
            yield from rows.rows()
