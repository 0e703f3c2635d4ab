"""The gateways that are there, and the requests that have lost the one that served them."""

from collections.abc import Iterable

from servicekit.bus.calls import SessionInfo, SessionKind


class Gateways:
    """The gateways as surveys of the pool have told of them."""

    def __init__(self, late_s: float, orphan_grace_s: float) -> None:
        """No gateway is known to be gone.

        Args:
            late_s: for so long after its lease a gateway still gets text: it may wake up, or come back to a restarted
                server, and should find what it missed.
            orphan_grace_s: after so long its requests are given up.
        """
        self._late_s = late_s
        self._orphan_grace_s = orphan_grace_s
        self._missing_s: dict[bytes, float] = {}  # sessions without a lease → since when
        self._gone: set[bytes] = set()
        self._told: set[bytes] = set()  # orphans that were cancelled

    def forget(self) -> None:
        """Forget what was said: the pool has lost it, or this session was lost to the pool."""
        self._missing_s, self._gone, self._told = {}, set(), set()

    def note(self, sessions: Iterable[SessionInfo], routes: Iterable[bytes], now_s: float) -> None:
        """Takes over a survey; `routes` are those of requests that were opened before it was made."""
        gateways = {session.sid: session.alive for session in sessions if session.kind is SessionKind.GATEWAY}
        # One that the pool has forgotten is named only by its requests.
        known = gateways.keys() | {route for route in routes if route}
        self._missing_s = {sid: self._missing_s.get(sid, now_s) for sid in known if not gateways.get(sid)}
        # Nobody would ever delete the text of one that is forgotten.
        self._gone = {
            sid for sid, since_s in self._missing_s.items() if sid not in gateways or now_s - since_s >= self._late_s
        }

    def is_gone(self, route: bytes) -> bool:
        """Return whether text for a gateway would be a stream without a reader, kept for ever."""
        return route in self._gone

    def orphans(self, requests: Iterable[tuple[bytes, bytes]], now_s: float) -> list[tuple[bytes, bytes]]:
        """Those requests, with their routes, whose clients lost their connection with their gateway; each once.

        Args:
            requests: (request id, route) of all live requests.
            now_s: on the clock of `note`.
        """
        lost = [
            (request_id, route)
            for request_id, route in requests
            if now_s - self._missing_s.get(route, now_s) >= self._orphan_grace_s
        ]
        new = [(request_id, route) for request_id, route in lost if request_id not in self._told]
        self._told = {request_id for request_id, _ in lost}
        return new
