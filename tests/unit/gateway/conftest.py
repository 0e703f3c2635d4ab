import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from api_keys import KEY, OTHER_KEY, line
from memory_bus import MemoryBus
from pool_sites import Site
from running_gateway import RunningGateway
from scripted_pipeline import ScriptedPipeline

from contract.domain.chat_facts import UNKNOWN_CHAT, ChatFacts
from contract.domain.generation_defaults import OPENAI_DEFAULTS, GenerationDefaults
from gateway_svc import call, delivery, link, pools
from gateway_svc.service import GatewayService
from gateway_svc.settings import GatewaySettings
from servicekit import logs


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bus in memory does not fall silent and pipelines lose nothing, but a machine may give this process no time for
    seconds. Requests that were silent for so long would ask for their text again, which scripts take for a client that
    came back.
    """
    monkeypatch.setattr(link, "ANSWER_S", 60.0)
    for module in (call, delivery):
        monkeypatch.setattr(module, "PROBE_S", 600.0)


@pytest.fixture
def launch() -> Iterator[Callable[..., RunningGateway]]:
    """Starts gateways with the given settings; ends them with the test."""
    running: list[RunningGateway] = []

    def start(
        beside: RunningGateway | None = None,
        *,
        defaults: GenerationDefaults = OPENAI_DEFAULTS,
        chat: ChatFacts = UNKNOWN_CHAT,
        **settings: Any,
    ) -> RunningGateway:
        bus = beside.bus if beside else MemoryBus()
        given = {"http_address": "127.0.0.1:0", "name": f"g{len(running)}", "session_ttl_s": 60.0}
        given |= {"outage_patience_s": 60.0, "sse_keep_alive_s": 0.0, **settings}
        pipeline = beside.pipeline if beside else ScriptedPipeline(bus, defaults=defaults, chat=chat)
        gateway = RunningGateway(bus, pipeline, GatewayService(GatewaySettings(**given), bus))
        running.append(gateway)
        gateway.start()
        return gateway

    yield start
    for gateway in running:
        gateway.close()
    for gateway in running:
        gateway.pipeline.close()


@pytest.fixture
def gateway(launch: Callable[..., RunningGateway]) -> RunningGateway:
    return launch()


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """A file with the keys of two tenants."""
    path = tmp_path / "keys"
    path.write_text("# who may call\n\n" + line(KEY, "one", name="laptop") + line(OTHER_KEY, "other", min_priority=5))
    return path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """No pool yet; its gateways end with the test."""
    made = Site(tmp_path)
    monkeypatch.setattr(pools, "open_bus", made.open_bus)
    yield made
    made.close()


@pytest.fixture
def http(gateway: RunningGateway) -> Iterator[httpx.Client]:
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=gateway.url, timeout=300, headers=headers) as client:
        yield client


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """All that is logged, at the level that says most."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.configure("debug", "json", stream=stream)
    for name in ("httpx", "httpcore", "grpc"):  # of this test's clients, which may log what they send
        logging.getLogger(name).setLevel(logging.CRITICAL)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
