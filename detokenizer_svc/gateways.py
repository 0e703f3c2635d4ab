"""Which gateways are there, and which requests have lost the one that served them."""

from collections.abc import Iterable

from servicekit.bus.calls import SessionInfo, SessionKind


class Gateways:
    """What surveys of the pool have said about gateways."""

    def __init__(self, orphan_grace_s: float) -> None:
        """`orphan_grace_s`: how long a gateway may be gone and come back before its requests are given up."""
        self._orphan_grace_s = orphan_grace_s
        self._gone_s: dict[bytes, float] = {}  # sessions that nobody reads the text of → since when
        self._told: set[bytes] = set()  # orphans that were cancelled

    def note(self, sessions: Iterable[SessionInfo], routes: Iterable[bytes], now_s: float) -> None:
        """Takes over a survey; `routes` are those of requests that were opened before it was made."""
        gateways = {session.sid: session.alive for session in sessions if session.kind is SessionKind.GATEWAY}
        # One that the pool has forgotten is named only by its requests.
        known = gateways.keys() | {route for route in routes if route}
        self._gone_s = {sid: self._gone_s.get(sid, now_s) for sid in known if not gateways.get(sid)}

    def is_gone(self, route: bytes) -> bool:
        """Whether text for a gateway would be a stream without a reader, kept for ever."""
        return route in self._gone_s

    def orphans(self, requests: Iterable[tuple[bytes, bytes]], now_s: float) -> list[bytes]:
        """Requests whose clients lost their connection with their gateway, each named once.

        Args:
            requests: (request id, route) of all live requests.
            now_s: on the clock of `note`.
        """
        lost = [
            request_id
            for request_id, route in requests
            if now_s - self._gone_s.get(route, now_s) >= self._orphan_grace_s
        ]
        new = [request_id for request_id in lost if request_id not in self._told]
        self._told = set(lost)
        return new
