import urllib.request

import pytest

from penstock.domain.errors import Fault, PenstockError
from servicekit.hops import Hop, HopCollector
from servicekit.metrics import MetricsEndpoint, make_registry


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text: str = reply.read().decode()
    return text


def test_two_services_of_one_process_have_endpoints_of_their_own() -> None:
    first = MetricsEndpoint("127.0.0.1:0", make_registry([HopCollector([Hop("prompts")])]))
    second = MetricsEndpoint("127.0.0.1:0", make_registry([HopCollector([Hop("steps")])]))
    try:
        assert 'hop="prompts"' in scrape(first.port)
        assert 'hop="steps"' in scrape(second.port)
        assert 'hop="prompts"' not in scrape(second.port)
        assert "process_cpu_seconds_total" in scrape(first.port)
    finally:
        first.close()
        second.close()


def test_a_taken_address_is_the_operators_fault_and_a_closed_one_is_free_again() -> None:
    endpoint = MetricsEndpoint("127.0.0.1:0", make_registry([]))
    address = f"127.0.0.1:{endpoint.port}"
    try:
        with pytest.raises(PenstockError, match="choose another metrics_address") as caught:
            MetricsEndpoint(address, make_registry([]))
        assert caught.value.fault is Fault.OPERATOR
    finally:
        endpoint.close()
    MetricsEndpoint(address, make_registry([])).close()
