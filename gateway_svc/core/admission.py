"""Return whether the gateway takes another call at all, and when a client that is turned away should come again."""

from collections import Counter
from dataclasses import dataclass

from contract.domain.errors import ErrorCode, PenstockError

RETRY_AFTER_S = 1.0  # where nothing is known: what hinders may be over at any moment
MAX_RETRY_AFTER_S = 60.0
# Times each bound where a client resumes what another gateway has let in: half of all may have died, and what was begun
# is not to wait until new requests leave room.
ROOM_FOR_RETURNS = 2


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of one gateway process; 0: none."""

    max_streams: int = 0  # requests being served at once
    max_tenants: int = 0  # for which they are


class Crowd:
    """For whom a gateway serves requests now, whatever pools they are in, and for how many it may."""

    __slots__ = ("_tenants", "limits", "num_streams")

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self.num_streams = 0
        self._tenants: Counter[str] = Counter()  # requests of each; a tenant without any is not there

    def enter(self, tenant: str) -> None:
        """A request of a tenant is served from now on."""
        self.num_streams += 1
        self._tenants[tenant] += 1

    def leave(self, tenant: str) -> None:
        """It is not any more."""
        self.num_streams -= 1
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    def num_tenants_beside(self, tenant: str) -> int:
        """For how many others requests are being served."""
        return len(self._tenants) - (tenant in self._tenants)


def retry_after_s(expected_s: float) -> float:
    """The error for a client that is turned away and is expected to have its turn in so long; 0: not known."""
    return min(max(expected_s, RETRY_AFTER_S), MAX_RETRY_AFTER_S)


def admit(
    limits: AdmissionLimits,
    *,
    num_streams: int,
    num_new: int,
    num_other_tenants: int = 0,
    draining: bool,
    connected: bool,
    is_return: bool = False,
    mean_stream_s: float = 0.0,
) -> None:
    """Lets `num_new` requests in beside the `num_streams` that are being served, each for `mean_stream_s` of late.

    Nothing new is let in where a client comes back to what is being served here. Where it resumes what another gateway
    has let in, bounds are `ROOM_FOR_RETURNS` times as high.

    Raises:
        PenstockError: UNAVAILABLE while draining or without the bus, OVERLOADED beyond a bound.
    """
    if draining:
        raise PenstockError(ErrorCode.UNAVAILABLE, "this gateway is shutting down; send the request to another")
    if not connected:
        raise PenstockError(
            ErrorCode.UNAVAILABLE, "the gateway cannot reach its Redis server at the moment; send the request again"
        )
    times = ROOM_FOR_RETURNS if is_return else 1
    if num_new and limits.max_streams and num_streams + num_new > times * limits.max_streams:
        raise PenstockError(
            ErrorCode.OVERLOADED,
            f"this gateway serves {num_streams} requests and takes at most {times * limits.max_streams}; send it again "
            "later",
            retry_after_s=retry_after_s(mean_stream_s * num_new / max(num_streams, 1)),
        )
    if num_new and limits.max_tenants and num_other_tenants >= times * limits.max_tenants:
        raise PenstockError(
            ErrorCode.OVERLOADED,
            f"this gateway serves {num_other_tenants} other tenants and takes at most {times * limits.max_tenants}; "
            "send it again later",
            retry_after_s=retry_after_s(mean_stream_s / num_other_tenants),
        )
