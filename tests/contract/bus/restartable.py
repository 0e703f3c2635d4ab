"""A pool whose server seems to be restarted."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from bus_flow import LONG_MS, Flow, sid_of, submit

from servicekit.bus.calls import Claim, Fetch, Greeting, Hello, Overload, SessionKind, StoredRequest, SubmitOutcome

A, B, C, D = (bytes([number, 0, 13, 10]) for number in range(4))  # tokens


ROUTE = sid_of(201)


@dataclass
class Restartable:
    """A pool whose server seems to be restarted, and whose time can pass."""

    flow: Flow
    restart: Callable[[], object]  # the next hello notices it
    wait: Callable[[], object]  # as long as a pool settles at least

    def come_back(self, sid: bytes, kind: SessionKind = SessionKind.GATEWAY, ttl_ms: int = LONG_MS) -> Greeting:
        """A session's hello after an outage."""
        return self.flow.connection.call(Hello(sid, kind, "g", "", ttl_ms, create=False))

    def claim(self) -> object:
        """What a scheduler that begins now gets."""
        return self.flow.connection.call(Claim(self.flow.session(), 10, 0))

    def stored(self, request_id: bytes) -> StoredRequest:
        """A request as it is."""
        found = self.flow.connection.call(Fetch(request_id))
        assert found is not None
        return found

    def confirm(
        self, request_id: bytes, *sequences: bytes, route: bytes = ROUTE, routed_ms: int = 0
    ) -> SubmitOutcome | Overload:
        """A gateway's submit with a witness, through another session than the first one."""
        again = replace(submit(request_id), witness=sequences, route=route, routed_ms=routed_ms)
        return self.flow.connection.call(again)
