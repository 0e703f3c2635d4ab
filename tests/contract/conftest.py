"""What all contracts of the bus share."""

import pytest

from servicekit.bus import redis_async_connection, redis_connection

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stands still for a while on a busy machine counts as there; a test about silence says otherwise."""
    for module in (redis_connection, redis_async_connection):
        monkeypatch.setattr(module, "PATIENCE_S", PATIENCE_S)
