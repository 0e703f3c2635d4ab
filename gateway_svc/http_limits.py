"""Bounds on HTTP connections, whoever they are from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of what anybody may do who can connect."""

    max_header_bytes: int
    max_headers: int
    head_timeout_s: float
    body_timeout_s: float
    idle_timeout_s: float
    max_connections: int
