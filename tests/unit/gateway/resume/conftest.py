from typing import Any

import pytest
from returning_clients import Launch
from running_gateway import RunningGateway


@pytest.fixture
def launch(launch: Launch) -> Launch:
    """With a pipeline that sees to re-attachments by itself, and requests that wait for their clients long enough."""

    def start(beside: RunningGateway | None = None, **settings: Any) -> RunningGateway:
        gateway = launch(beside, **{"resume_grace_s": 600.0, **settings})
        gateway.pipeline.follows = True
        return gateway

    return start


@pytest.fixture
def other(launch: Launch, gateway: RunningGateway) -> RunningGateway:
    """A second gateway of the pool."""
    return launch(gateway)


@pytest.fixture(params=["same", "other"])
def second(request: pytest.FixtureRequest, gateway: RunningGateway) -> RunningGateway:
    """Where the client comes back."""
    return gateway if request.param == "same" else request.getfixturevalue("other")
