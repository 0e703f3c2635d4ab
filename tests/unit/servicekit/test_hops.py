import pytest
from prometheus_client import CollectorRegistry, generate_latest

from servicekit.hops import BOUNDS_S, RECENT, Hop, HopCollector

SECOND = 10**9
NOW = 1_700_000_000 * SECOND


def test_quantiles_of_wait_and_work() -> None:
    hop = Hop("prompts")
    for index in range(100):
        hop.observe(NOW - index * 1_000_000, NOW, index * 1e-5)
    status = hop.status(NOW)
    assert status.hop == "prompts"
    assert status.wait_p50_s == pytest.approx(0.050)
    assert status.wait_p99_s == pytest.approx(0.099)
    assert status.work_p50_s == pytest.approx(5e-4)
    assert status.work_p99_s == pytest.approx(99e-5)
    assert status.rate == pytest.approx(10.0)


def test_what_is_older_than_the_window_is_forgotten() -> None:
    hop = Hop("prompts")
    hop.observe(NOW - 60 * SECOND, NOW - 30 * SECOND, 1.0)
    hop.observe(NOW - SECOND, NOW, 2.0)
    status = hop.status(NOW)
    assert (status.wait_p99_s, status.work_p99_s, status.rate) == (1.0, 2.0, 0.1)


def test_rate_of_more_messages_than_are_kept() -> None:
    hop = Hop("steps")
    for index in range(2 * RECENT):
        hop.observe(NOW, NOW + index * 1_000_000, 0.0)
    assert hop.status(NOW + 2 * RECENT * 1_000_000).rate == pytest.approx(1000.0)


def test_a_hop_that_read_nothing_is_all_zero() -> None:
    status = Hop("steps").status(NOW)
    assert (status.wait_p50_s, status.work_p99_s, status.rate) == (0.0, 0.0, 0.0)


def test_a_message_from_the_future_did_not_wait() -> None:
    hop = Hop("steps")
    hop.observe(NOW + SECOND, NOW, 0.0)
    assert hop.status(NOW).wait_p99_s == 0.0


def test_exposition_has_cumulative_buckets_sum_and_count() -> None:
    hop, idle = Hop("results"), Hop("cancels")
    hop.observe(NOW, NOW + SECOND, 20.0)
    hop.observe(NOW, NOW + 20 * SECOND, 3e-5)
    registry = CollectorRegistry()
    registry.register(HopCollector([hop, idle]))
    text = generate_latest(registry).decode()
    assert 'penstock_hop_wait_seconds_bucket{hop="results",le="0.5"} 0.0' in text
    assert 'penstock_hop_wait_seconds_bucket{hop="results",le="1.0"} 1.0' in text
    assert 'penstock_hop_wait_seconds_bucket{hop="results",le="+Inf"} 2.0' in text
    assert 'penstock_hop_wait_seconds_count{hop="results"} 2.0' in text
    assert 'penstock_hop_wait_seconds_sum{hop="results"} 21.0' in text
    assert 'penstock_hop_work_seconds_bucket{hop="results",le="5e-05"} 1.0' in text
    assert 'penstock_hop_work_seconds_count{hop="cancels"} 0.0' in text


def test_a_bound_belongs_to_its_bucket() -> None:
    hop = Hop("results")
    for bound in BOUNDS_S:
        hop.observe(NOW, NOW, bound)
    assert hop.work.counts == [1] * len(BOUNDS_S) + [0]
    assert hop.work.total == pytest.approx(sum(BOUNDS_S))
