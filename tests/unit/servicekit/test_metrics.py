import urllib.error
import urllib.request
from dataclasses import dataclass

import pytest

from contract.domain.errors import Fault, PenstockError
from servicekit.hops import Hop, HopCollector
from servicekit.metrics import MetricsEndpoint, make_registry


@dataclass
class Vitals:
    is_ready: bool = True
    is_alive: bool = True


def check(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=300) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=300) as reply:
        text: str = reply.read().decode()
    return text


def test_two_services_of_one_process_have_endpoints_of_their_own() -> None:
    first = MetricsEndpoint("127.0.0.1:0", make_registry([HopCollector([Hop("prompts")])]), Vitals())
    second = MetricsEndpoint("127.0.0.1:0", make_registry([HopCollector([Hop("steps")])]), Vitals())
    try:
        assert 'hop="prompts"' in scrape(first.port)
        assert 'hop="steps"' in scrape(second.port)
        assert 'hop="prompts"' not in scrape(second.port)
        assert "process_cpu_seconds_total" in scrape(first.port)
    finally:
        first.close()
        second.close()


def test_a_taken_address_is_the_operators_fault_and_a_closed_one_is_free_again() -> None:
    endpoint = MetricsEndpoint("127.0.0.1:0", make_registry([]), Vitals())
    address = f"127.0.0.1:{endpoint.port}"
    try:
        with pytest.raises(PenstockError, match="choose another metrics_address") as caught:
            MetricsEndpoint(address, make_registry([]), Vitals())
        assert caught.value.fault is Fault.OPERATOR
    finally:
        endpoint.close()
    MetricsEndpoint(address, make_registry([]), Vitals()).close()


def test_health_and_readiness_are_told_beside_the_metrics() -> None:
    vitals = Vitals(is_ready=False)
    endpoint = MetricsEndpoint("127.0.0.1:0", make_registry([]), vitals)
    try:
        assert (check(endpoint.port, "/health"), check(endpoint.port, "/ready")) == (200, 503)
        vitals.is_ready = True
        assert (check(endpoint.port, "/health"), check(endpoint.port, "/ready")) == (200, 200)
        vitals.is_ready = vitals.is_alive = False
        assert (check(endpoint.port, "/health"), check(endpoint.port, "/ready")) == (503, 503)
        assert "process_cpu_seconds_total" in scrape(endpoint.port)
    finally:
        endpoint.close()
