"""docs/architecture.md lists exactly the metrics that there are, with their labels and the services they are from."""

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from in_memory import Pipeline
from prometheus_client.metrics_core import Metric

from penstock.domain.params import SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
Listed = dict[str, tuple[frozenset[str], frozenset[str]]]  # metric → (labels, services)
SUFFIXES = {"counter": "_total", "info": "_info"}  # that exposition adds
ALL = frozenset({"gateway", "tokenizer", "scheduler", "worker", "detokenizer"})


def listed() -> Listed:
    """What the page says."""
    section = PAGE.read_text().partition("## Metrics")[2].partition("\n## ")[0]
    found: Listed = {}
    for names, services in re.findall(r"^\| (`.*?) \| ([a-z, ]+) \|", section, re.MULTILINE):
        kinds = ALL if services == "all" else frozenset(services.split(", "))
        for name, labels in re.findall(r"`(\w+)(?:\{([\w,]+)\})?`", names):
            assert name not in found
            found[name] = (frozenset(labels.split(",")) - {""}, kinds)
    return found


def families(pipeline: Pipeline) -> Iterator[tuple[str, Metric]]:
    """What there is, each with its service."""
    for each in pipeline.running:
        for collector in each.service.collectors():
            for family in collector.collect():
                yield each.service.kind.value, family


def test_the_page_lists_the_metrics_that_there_are(checkpoint: Path) -> None:
    worker = {"runner": "simulated", "step_ms": 1.0, "num_blocks": 64}
    with Pipeline(checkpoint, worker=worker) as pipeline:
        pipeline.client.complete([1, 2], SamplingParams(max_tokens=3))
        deadline_s = time.monotonic() + 20
        while (found := shown(families(pipeline))) != listed() and time.monotonic() < deadline_s:
            time.sleep(0.05)  # some have labels once something was looked at
    assert found == listed()


def shown(found: Iterable[tuple[str, Metric]]) -> Listed:
    """What there is, as the page lists it."""
    labels: dict[str, set[str]] = defaultdict(set)
    services: dict[str, set[str]] = defaultdict(set)
    for service, family in found:
        assert family.name.startswith("penstock_")
        assert family.documentation
        name = family.name.removeprefix("penstock_") + SUFFIXES.get(family.type, "")
        services[name].add(service)
        labels[name] |= {label for sample in family.samples for label in sample.labels} - {"le"}
    return {name: (frozenset(labels[name]), frozenset(services[name])) for name in services}


def test_durations_are_seconds() -> None:
    for name in listed():
        assert not re.search(r"_(ms|ns|us|millis\w*|minutes)(_|$)", name), name
