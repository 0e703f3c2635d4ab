"""What operators see: the gRPC control service and the metrics."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from memory_bus import MemoryBus
from prometheus_client import CollectorRegistry, generate_latest
from scheduler_pool import LIMITS, Client, Worker, scheduler, until

from contract.domain.errors import ErrorCode, PenstockError
from contract.v1 import scheduler_pb2
from scheduler_svc.servicer import SchedulerServicer


def call(method: Any, request: Any) -> Any:
    return asyncio.run(method(request, None))


def test_the_control_service_shows_books_tables_and_requests() -> None:
    bus = MemoryBus()
    with scheduler(bus) as service, Worker(bus) as worker:
        servicer, client = SchedulerServicer(service), Client(bus)
        until(lambda: len(service.incarnations()) == 1, "the pairing")
        worker.is_held.set()
        first = client.submit(1, list(range(10)), n=2)
        until(lambda: service.stats().num_running_seqs == 2, "both samples")
        others = [client.submit(number, [number]) for number in range(2, 6)]
        until(lambda: service.stats().num_requests == 5, "the claims")

        status = call(servicer.GetStatus, scheduler_pb2.GetSchedulerStatusCall())
        (books,) = status.workers
        assert (books.worker, books.incarnation, books.num_blocks) == ("w", worker.incarnation, 32)
        assert (books.block_size, books.used_slots, books.num_slots) == (4, status.running, 4)
        assert books.plans_in_flight == 2
        assert books.used_blocks >= 4
        assert status.waiting + status.running == 6
        assert status.service.ready

        table = call(servicer.GetBlockTable, scheduler_pb2.GetBlockTableCall(request_id=first.hex()))
        assert [sequence.sequence for sequence in table.sequences] == [0, 1]
        assert list(table.sequences[0].ref_counts)[:2] == [2, 2]
        assert table.sequences[0].block_ids[:2] == table.sequences[1].block_ids[:2]

        held = call(servicer.ListRequests, scheduler_pb2.ListRequestsCall()).requests
        assert len(held) == 5
        assert held[0].state == "running"
        assert {request.request_id for request in held} == {first.hex(), *(other.hex() for other in others)}
        limited = call(servicer.ListRequests, scheduler_pb2.ListRequestsCall(limit=2)).requests
        assert len(limited) == 2
        assert limited[0].prompt_tokens == 10
        assert limited[0].age_s >= 0

        worker.is_held.clear()
        client.wait(*((request_id, 0) for request_id in (first, *others)), (first, 1))


@pytest.mark.parametrize(
    ("request_id", "code"), [("nonsense", ErrorCode.INVALID_ARGUMENT), ("0" * 32, ErrorCode.NOT_FOUND)]
)
def test_a_table_of_what_is_not_held_is_a_typed_error(request_id: str, code: ErrorCode) -> None:
    with scheduler(MemoryBus()) as service, pytest.raises(PenstockError) as caught:
        call(SchedulerServicer(service).GetBlockTable, scheduler_pb2.GetBlockTableCall(request_id=request_id))
    assert (caught.value.code, caught.value.param) == (code, "request_id")


def test_drain_tells_how_many_requests_are_left() -> None:
    bus = MemoryBus()
    with scheduler(bus) as service:
        Client(bus).submit(1, [1])
        until(lambda: service.stats().num_requests == 1, "the claim")
        assert call(SchedulerServicer(service).Drain, scheduler_pb2.DrainSchedulerCall()).requests_left == 1
        assert call(SchedulerServicer(service).GetStatus, scheduler_pb2.GetSchedulerStatusCall()).service.draining


def test_metrics_have_the_documented_names_and_no_label_that_a_client_makes() -> None:
    bus = MemoryBus()
    with scheduler(bus) as service, Worker(bus):
        client = Client(bus)
        ids = [client.submit(number, list(range(10)), max_tokens=5) for number in (1, 2)]
        client.wait(*((request_id, 0) for request_id in ids))
        registry = CollectorRegistry()
        for collector in service.collectors():
            registry.register(collector)
        text = generate_latest(registry).decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines["penstock_prompt_tokens_total"]) == 20
    assert float(lines["penstock_generated_tokens_total"]) == 10
    assert float(lines['penstock_sequences{state="running"}']) == 0
    assert float(lines['penstock_kv_blocks{state="used",worker="w"}']) == 0
    blocks = [float(lines[f'penstock_kv_blocks{{state="{state}",worker="w"}}']) for state in ("used", "cached", "free")]
    assert sum(blocks) == 32
    assert float(lines['penstock_finished_requests_total{outcome="length"}']) == 2
    assert float(lines["penstock_step_tokens_sum"]) >= 20
    assert float(lines['penstock_batch_sequences_bucket{le="+Inf"}']) == float(lines["penstock_batch_sequences_count"])
    assert 'penstock_plans_in_flight{worker="w"}' in lines
    assert float(lines['penstock_saved_states{state="free",worker="w"}']) == 0  # no layer keeps one
    assert "penstock_preemptions_total" in lines
    assert 'penstock_hop_wait_seconds_count{hop="results"}' in lines
    for request_id in ids:
        assert request_id.hex() not in text


def test_states_that_are_saved_are_told_of_workers_whose_layers_keep_some() -> None:
    bus = MemoryBus()
    limits = replace(LIMITS, has_state=True, num_saved_states=5)
    with scheduler(bus, min_saved_tokens=4) as service, Worker(bus, limits=limits):
        client = Client(bus)
        client.wait((client.submit(1, list(range(10)), max_tokens=5), 0))
        registry = CollectorRegistry()
        for collector in service.collectors():
            registry.register(collector)
        text = generate_latest(registry).decode()
    assert 'penstock_saved_states{state="used",worker="w"} 1.0' in text
    assert 'penstock_saved_states{state="free",worker="w"} 4.0' in text
