"""Services tell exactly the metrics that they declare, from which docs/metrics.md is made; names follow Prometheus."""

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import pytest
from in_memory import Pipeline
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from contract.domain.params import SamplingParams
from servicekit.bus.calls import SessionKind
from servicekit.metric_families import Family
from tools import generate_metrics

Shown = dict[str, dict[str, frozenset[str]]]  # service → metric → labels
SUFFIXES = {"counter": "_total", "info": "_info"}  # that exposition adds
KINDS = {kind.value for kind in SessionKind}
SERVICES = {name: families for name, families in generate_metrics.SERVICES.items() if name in KINDS}
ALL = [(service, family) for service, families in generate_metrics.SERVICES.items() for family in families]
ids = [f"{service}-{family.name}" for service, family in ALL]


def collected(pipeline: Pipeline) -> Iterator[tuple[str, Metric]]:
    """What there is, each with its service."""
    for each in pipeline.running:
        for collector in each.service.collectors():
            for family in collector.collect():
                yield each.service.kind.value, family


def shown(found: Iterable[tuple[str, Metric]]) -> Shown:
    """The names and labels of what there is."""
    labels: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for service, family in found:
        name = family.name + SUFFIXES.get(family.type, "")
        labels[service][name] |= {label for sample in family.samples for label in sample.labels} - {"le"}
    return {service: {name: frozenset(each) for name, each in names.items()} for service, names in labels.items()}


def declared() -> Shown:
    """The families that services name."""
    return {
        service: {family.name: frozenset(family.labels) for family in families}
        for service, families in SERVICES.items()
    }


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> Iterator[Pipeline]:
    worker = {"runner": "simulated", "step_ms": 1.0, "num_blocks": 64}
    with Pipeline(checkpoint, worker=worker) as pipeline:
        yield pipeline


def test_services_tell_what_they_declare(pipeline: Pipeline) -> None:
    pipeline.client.complete([1, 2], SamplingParams(max_tokens=3))
    deadline_s = time.monotonic() + 300
    while (found := shown(collected(pipeline))) != declared() and time.monotonic() < deadline_s:
        time.sleep(0.05)  # some have labels once something was looked at
    assert found == declared()


def test_known_values_of_labels_are_told_from_the_start(pipeline: Pipeline) -> None:
    told: dict[tuple[str, str], set[tuple[str, ...]]] = defaultdict(set)
    for service, family in collected(pipeline):
        labels = known_labels(service, family)
        for sample in family.samples:
            told[service, family.name + SUFFIXES.get(family.type, "")].add(
                tuple(sample.labels[each] for each in labels)
            )
    for service, families in SERVICES.items():
        for family in families:
            if all(family.labels.values()):
                assert set(product(*family.labels.values())) <= told[service, family.name], family.name


def known_labels(service: str, family: Metric) -> tuple[str, ...]:
    name = family.name + SUFFIXES.get(family.type, "")
    (found,) = (each for each in SERVICES[service] if each.name == name)
    return tuple(found.labels) if all(found.labels.values()) else ()


def test_services_of_one_kind_tell_a_family_once(pipeline: Pipeline) -> None:
    for each in pipeline.running:
        registry = CollectorRegistry(auto_describe=False)
        for collector in each.service.collectors():
            registry.register(collector)
        names = [family.name for family in registry.collect()]
        assert len(names) == len(set(names))


def test_the_page_is_made_of_the_declarations() -> None:
    assert generate_metrics.PAGE.read_text() == generate_metrics.page(), "run `make docs`"


@pytest.mark.parametrize(("service", "family"), ALL, ids=ids)
def test_names_follow_prometheus(service: str, family: Family) -> None:
    prefix = "vllm:" if service.endswith("vllm") else "penstock_"
    assert re.fullmatch(prefix + "[a-z0-9_]+", family.name)
    assert family.name.endswith("_total") == (family.type == "counter")
    assert family.name.endswith("_info") == (family.type == "info")
    assert not re.search(r"_(ms|ns|us|millis\w*|minutes)(_|$)", family.name), "durations are seconds"
    assert re.fullmatch(r"[A-Z].*\.", family.help), "a sentence"
