"""Requests that wait for their first slot, and the bounds on them."""

from dataclasses import dataclass, field
from typing import Final

from servicekit.bus.calls.call import Call


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds on what waits for its first slot; 0: none. A request beyond a bound on tokens may still wait alone."""

    requests: int = 0
    tokens: int = 0  # of prompts
    tenant_requests: int = 0  # of one tenant
    tenant_tokens: int = 0


NO_BOUNDS: Final = Bounds()


@dataclass(frozen=True, slots=True)
class Overload:
    """Refused by `submit`: as much waits as its bounds allow."""

    of_tenant: bool  # the tenant's bound, else the pool's
    of_tokens: bool  # the bound on tokens, else the one on requests
    wait_ms: int  # in which all that waits there would start, at the rate of late; 0: nothing has started lately


@dataclass(frozen=True, slots=True)
class Waiting:
    """Requests that wait for their first slot."""

    num_requests: int
    num_tokens: int  # of prompts; those of text are estimated until it is tokenized
    num_tenant_requests: int
    num_tenant_tokens: int
    # In which all that waits in the pool would start, at the rate of late. While nothing has started since the first of
    # it came: how long ago that was, which is the least that it can be.
    expected_wait_ms: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class CountWaiting(Call[Waiting]):
    """All that waits in the pool, and of it a tenant's part."""

    tenant: str = ""
