"""Cancels that come before their requests."""

from collections import OrderedDict
from dataclasses import dataclass

from contract.domain.finish import CancelReason

MAX_REQUESTS = 65_536  # every scheduler hears of the cancels of all others' requests, too
_KEPT_NS = 60 * 10**9


@dataclass(frozen=True, slots=True)
class EarlyCancel:
    """A cancel of a request that has not come yet."""

    reason: CancelReason
    sequence: int | None  # None: all of the request's
    received_ns: int


class EarlyCancels:
    """Remembered for a minute, of the last 65,536 requests."""

    def __init__(self) -> None:
        self._by_request: OrderedDict[bytes, list[EarlyCancel]] = OrderedDict()  # by when the first one came

    def note(self, request_id: bytes, cancel: EarlyCancel) -> None:
        """One has come; the oldest are forgotten where there are too many."""
        self._by_request.setdefault(request_id, []).append(cancel)
        while len(self._by_request) > MAX_REQUESTS:
            self._by_request.popitem(last=False)

    def take(self, request_id: bytes) -> list[EarlyCancel]:
        """Those of a request that has come now, the first one first."""
        return self._by_request.pop(request_id, [])

    def expire(self, now_ns: int) -> None:
        """Forget the old ones: their requests have ended or never were."""
        while self._by_request:
            oldest = next(iter(self._by_request.values()))
            if oldest[0].received_ns > now_ns - _KEPT_NS:
                break
            self._by_request.popitem(last=False)
