"""Whether the gateway takes another call at all."""

from dataclasses import dataclass

from penstock.domain.errors import ErrorCode, PenstockError

RETRY_AFTER_S = 1  # told to clients that are turned away for now


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one gateway process; 0: none."""

    max_streams: int = 0  # requests being served at once


def admit(limits: Limits, *, num_streams: int, num_new: int, draining: bool, connected: bool) -> None:
    """Lets `num_new` requests in beside the `num_streams` that are being served.

    Raises:
        PenstockError: UNAVAILABLE while draining or without the bus, OVERLOADED beyond the bound.
    """
    if draining:
        raise PenstockError(ErrorCode.UNAVAILABLE, "this gateway is shutting down; send the request to another")
    if not connected:
        raise PenstockError(
            ErrorCode.UNAVAILABLE, "the gateway cannot reach its Redis server at the moment; send the request again"
        )
    if limits.max_streams and num_streams + num_new > limits.max_streams:
        raise PenstockError(
            ErrorCode.OVERLOADED,
            f"this gateway serves {num_streams} requests and takes at most {limits.max_streams}; send it again later",
        )
