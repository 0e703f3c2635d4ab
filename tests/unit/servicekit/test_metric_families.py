"""Families of metrics as data, and what a scrape makes of them."""

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from contract.domain.histogram import Exemplar, Histogram
from servicekit.metric_families import CounterFamily, Family, GaugeFamily, HistogramFamily, InfoFamily
from servicekit.metrics import metrics_page

OPENMETRICS = "application/openmetrics-text; version=1.0.0; q=0.9"
TRACE = "0af7651916cd43dd8448eb211c80319c"


class Collected(Collector):
    def __init__(self, *metrics: Metric) -> None:
        self._metrics = metrics

    def collect(self) -> tuple[Metric, ...]:
        return self._metrics


def page(*metrics: Metric, accept: str = "") -> list[str]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected(*metrics))
    return metrics_page(registry, accept)[0].decode().splitlines()


def test_known_values_of_all_labels_are_told_before_they_are_counted() -> None:
    family = CounterFamily("requests_total", "Requests.", {"kind": ("a", "b"), "outcome": ("x", "y")})
    lines = page(family.by({("a", "y"): 3}))
    assert 'requests_total{kind="a",outcome="y"} 3.0' in lines
    assert len([line for line in lines if line.endswith(" 0.0")]) == 3


def test_a_label_whose_values_are_found_out_has_those_that_are_told_only() -> None:
    family = GaugeFamily("blocks", "Blocks.", {"worker": (), "state": ("used", "free")})
    assert [line for line in page(family.by({("w", "used"): 1})) if line[0] != "#"] == [
        'blocks{state="used",worker="w"} 1.0'
    ]


@pytest.mark.parametrize(
    ("family", "unit"),
    [
        (CounterFamily("penstock_device_idle_seconds_total", "."), "seconds"),
        (CounterFamily("penstock_checkpoint_bytes_total", "."), "bytes"),
        (GaugeFamily("penstock_waiting_tokens", "."), "tokens"),
        (CounterFamily("penstock_resumes_total", "."), ""),
        (GaugeFamily("penstock_bus_up", "."), ""),
    ],
)
def test_the_unit_is_the_last_word_of_the_name(family: Family, unit: str) -> None:
    assert family.unit == unit


def test_openmetrics_says_units_and_names_the_last_request_of_each_bucket() -> None:
    histogram = Histogram((0.1, 1.0))
    histogram.observe(0.05, Exemplar(bytes(15) + b"\x01"))
    histogram.observe(0.06, Exemplar(bytes(15) + b"\x02", TRACE))
    histogram.observe(0.1)
    histogram.observe(7.0, Exemplar(bytes(15) + b"\x03"))
    metric = HistogramFamily("latency_seconds", "Latency.").of(histogram)
    lines = page(metric, accept=OPENMETRICS)
    assert "# UNIT latency_seconds seconds" in lines
    assert f'latency_seconds_bucket{{le="0.1"}} 3.0 # {{request_id="{2:032x}",trace_id="{TRACE}"}} 0.06' in lines
    assert 'latency_seconds_bucket{le="1.0"} 3.0' in lines
    assert f'latency_seconds_bucket{{le="+Inf"}} 4.0 # {{request_id="{3:032x}"}} 7.0' in lines
    assert lines[-1] == "# EOF"
    assert not any("request_id" in line for line in page(metric)), "text has no exemplars"


@pytest.mark.parametrize("accept", ["", OPENMETRICS, "text/plain", "application/openmetrics-text"])
def test_names_with_colons_stay_as_they_are(accept: str) -> None:
    lines = page(GaugeFamily("vllm:num_requests_running", "Running.").of(2), accept=accept)
    assert "vllm:num_requests_running 2.0" in lines


def test_info_has_as_many_things_as_there_are() -> None:
    family = InfoFamily("model_info", "Models.", {"model": (), "digest": ()})
    assert [line for line in page(family.of()) if line[0] != "#"] == []
    lines = page(family.of(("m", "d"), ("n", "e")))
    assert {'model_info{digest="d",model="m"} 1.0', 'model_info{digest="e",model="n"} 1.0'} <= set(lines)


def test_a_copy_of_a_histogram_does_not_change() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(2.0)
    copied = histogram.copy()
    histogram.observe(4.0)
    assert (copied.counts, copied.total, copied.mean) == ([0, 1], 2.0, 2.0)
    assert (histogram.counts, histogram.total, histogram.mean) == ([0, 2], 6.0, 3.0)
    assert Histogram((1.0,)).mean == 0.0
