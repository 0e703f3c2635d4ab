"""The picture of a pool that a page draws."""

from pathlib import Path

import httpx
import msgspec
import pytest
from running_gateway import RunningGateway

from contract.v1 import status_pb2
from gateway_svc.core.pipeline import HopReading, ServiceReading, WorkerBlocks, pipeline_fields
from gateway_svc.core.reply_schemas import PipelineReply
from gateway_svc.pipeline import PipelineReading
from gateway_svc.wire.pipeline import decode_services
from servicekit.bus.calls import SessionInfo, SessionKind

BLOCKS = WorkerBlocks("worker-0", 3, 1, bytes((255, 51, 0)), bytes((0, 51, 255)))


def service(kind: str, state: str = "ready", **more: object) -> ServiceReading:
    return ServiceReading(kind, f"{kind}-0", state, 2, **more)  # type: ignore[arg-type]


def test_figures_are_sums_over_those_who_live() -> None:
    services = [
        service("scheduler", figures={"running": 3, "blocks_used": 5}, blocks=[BLOCKS]),
        service("scheduler", "draining", figures={"running": 4}),
        service("scheduler", "gone", figures={"running": 100}, blocks=[BLOCKS]),
    ]
    told = pipeline_fields("pool", services, {})
    assert (told["figures"]["running"], told["figures"]["blocks_used"], told["figures"]["waiting"]) == (7, 5, 0)
    assert [each["state"] for each in told["services"]] == ["ready", "draining", "gone"]
    [blocks] = told["blocks"]
    assert (blocks["used"], blocks["cached"]) == ([1.0, 0.2, 0.0], [0.0, 0.2, 1.0])


def test_a_hop_is_told_of_all_of_its_streams_and_readers_and_as_its_slowest_reader_sees_it() -> None:
    services = [
        service("worker", hops=[HopReading("steps", 0.001, 0.002, 0.01, 0.02, 50.0)]),
        service("worker", hops=[HopReading("steps", 0.003, 0.004, 0.005, 0.006, 25.0)]),
    ]
    told = pipeline_fields("pool", services, {"steps:a": 3, "steps:b": 4, "results:a": 9})
    hops = {each["hop"]: each for each in told["hops"]}
    assert list(hops) == ["prompts", "requests", "steps", "results", "tokens", "text"]
    assert hops["steps"] == {
        "hop": "steps",
        "from": "scheduler",
        "to": "worker",
        "entries": 7,
        "waiting": 0.125,
        "rate": 75.0,
        "wait_p50_ms": 3.0,
        "wait_p99_ms": 4.0,
        "work_p50_ms": 10.0,
        "work_p99_ms": 20.0,
    }
    assert (hops["results"]["entries"], hops["results"]["rate"]) == (9, 0.0)


def test_a_status_that_cannot_be_read_is_a_service_without_figures() -> None:
    readable = status_pb2.ServiceStatus(ready=True, figures={"running": 1.0}, note="of no use")
    readable.block_maps.add(worker="worker-0", num_blocks=3, group_size=1, used=BLOCKS.used, cached=BLOCKS.cached)

    def session(status: bytes, *, alive: bool = True) -> SessionInfo:
        return SessionInfo(b"sid", SessionKind.SCHEDULER, "s", "host:1", alive, 0, status)

    sessions = [session(readable.SerializeToString()), session(b"\xff\xff"), session(b"", alive=False)]
    first, second, third = decode_services(PipelineReading("pool", sessions, {}))
    assert (first.state, first.note, first.figures, list(first.blocks)) == (
        "ready",
        "of no use",
        {"running": 1.0},
        [BLOCKS],
    )
    assert (second.state, second.figures, third.state) == ("not_ready", {}, "gone")


def test_the_picture_is_told_as_its_schema_says(http: httpx.Client) -> None:
    reply = http.get("/v1/pipeline")
    told = msgspec.json.decode(reply.content, type=PipelineReply, strict=True)
    assert told.pool == "penstock"
    assert "gateway" in {each.kind for each in told.services}


def test_a_pool_that_is_not_there_is_a_404(http: httpx.Client) -> None:
    reply = http.get("/v1/pipeline", params={"pool": "nowhere"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "pool")


def test_the_page_loads_nothing_from_elsewhere(gateway: RunningGateway) -> None:
    reply = httpx.get(gateway.url, timeout=300)
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    parts = sorted(path.name for path in (Path(__file__).parents[3] / "gateway_svc" / "page").iterdir())
    served = {name: httpx.get(f"{gateway.url}/page/{name}", timeout=300) for name in parts}
    # The other two are the whole of / and of /docs.
    assert [name for name, each in served.items() if each.status_code != 200] == ["docs.html", "index.html"]
    for name, each in {"": reply, **served}.items():
        assert "://" not in each.text.replace("http://www.w3.org/2000/svg", ""), name


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fhttp.py", "docs.html"])
def test_what_is_no_part_of_the_page_is_a_404(http: httpx.Client, name: str) -> None:
    assert http.get(f"/page/{name}").status_code == 404
