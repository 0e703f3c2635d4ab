"""Metrics as data: a name, a sentence and labels, from which come the families of a scrape and docs/metrics.md.

A family whose labels have known values tells all of them from the start, with 0: a rate over a series that begins with
its first event does not see that event.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import ClassVar, Self, TypeAlias, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar as Shown

from contract.domain.histogram import Histogram
from contract.domain.request import format_request_id

Labels: TypeAlias = Mapping[str, tuple[str, ...]]  # known values by label; none: they are found out while it runs
Key = TypeVar("Key", bound=str | tuple[str, ...])  # the value of the label, or of each

_EXPOSED_UNITS = ("seconds", "bytes", "tokens")
_UNITS = (*_EXPOSED_UNITS, "blocks", "requests", "sequences", "rows", "entries")
_SUFFIXES = ("_total", "_info")


@dataclass(frozen=True, slots=True)
class Family:
    """The description of one metric. The name is the whole one, as queries have it."""

    name: str
    help: str
    labels: Labels = field(default_factory=dict)

    type: ClassVar[str] = ""

    @property
    def unit(self) -> str:
        """The base unit, which is the last word of the name; empty: a plain number."""
        last = self._base.rpartition("_")[2]
        return last if last in _UNITS else ""

    def among(self, **labels: Iterable[str]) -> Self:
        """The same family where these values of labels are known, in a process that has found them out."""
        return replace(self, labels={**self.labels, **{name: tuple(values) for name, values in labels.items()}})

    @property
    def _base(self) -> str:
        for suffix in _SUFFIXES:
            if self.name.endswith(suffix):
                return self.name.removesuffix(suffix)
        return self.name

    @property
    def _exposed_unit(self) -> str:
        return self.unit if self.unit in _EXPOSED_UNITS else ""

    def _complete(self, values: Mapping[Key, float]) -> dict[tuple[str, ...], float]:
        """All values by those of the labels, 0 for those that are known and not among them."""
        known = product(*self.labels.values()) if all(self.labels.values()) else ()
        found: dict[tuple[str, ...], float] = dict.fromkeys(known, 0)
        found |= {_labels_of(key): value for key, value in values.items()}
        return found


class CounterFamily(Family):
    """A total since the process began; its name ends with `_total`."""

    __slots__ = ()
    type = "counter"

    def of(self, value: float) -> Metric:
        """Its only value."""
        return CounterMetricFamily(self.name, self.help, value, unit=self._exposed_unit)

    def by(self, values: Mapping[Key, float]) -> Metric:
        """A value for each value of its labels."""
        family = CounterMetricFamily(self.name, self.help, labels=tuple(self.labels), unit=self._exposed_unit)
        for labels, value in self._complete(values).items():
            family.add_metric(labels, value)
        return family


class GaugeFamily(Family):
    """A figure of now."""

    __slots__ = ()
    type = "gauge"

    def of(self, value: float) -> Metric:
        """Its only value."""
        return GaugeMetricFamily(self.name, self.help, value, unit=self._exposed_unit)

    def by(self, values: Mapping[Key, float]) -> Metric:
        """A value for each value of its labels."""
        family = GaugeMetricFamily(self.name, self.help, labels=tuple(self.labels), unit=self._exposed_unit)
        for labels, value in self._complete(values).items():
            family.add_metric(labels, value)
        return family


class InfoFamily(Family):
    """Properties as labels of a 1; its name ends with `_info`."""

    __slots__ = ()
    type = "info"

    def of(self, *values: Iterable[str]) -> Metric:
        """Nothing, or one or several things, each with the values of all labels."""
        family = InfoMetricFamily(self._base, self.help, labels=())
        for each in values:
            family.add_metric((), dict(zip(self.labels, each, strict=True)))
        return family


class HistogramFamily(Family):
    """Counts of values up to each bound, with requests that are examples of them."""

    __slots__ = ()
    type = "histogram"

    def of(self, histogram: Histogram) -> Metric:
        """Its only histogram."""
        return self.by({(): histogram})

    def by(self, histograms: Mapping[Key, Histogram]) -> Metric:
        """A histogram for each value of its labels."""
        family = HistogramMetricFamily(self.name, self.help, labels=tuple(self.labels), unit=self._exposed_unit)
        for key, histogram in histograms.items():
            family.add_metric(_labels_of(key), _buckets(histogram), histogram.total)
        return family


def _labels_of(key: str | tuple[str, ...]) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _buckets(histogram: Histogram) -> list[tuple[str, float] | tuple[str, float, Shown]]:
    """(upper bound, observations up to it) and an example, as Prometheus wants them."""
    buckets: list[tuple[str, float] | tuple[str, float, Shown]] = []
    total = 0
    exemplars = dict(histogram.exemplars)
    for index, (bound, count) in enumerate(zip((*histogram.bounds, None), list(histogram.counts), strict=True)):
        total += count
        shown = "+Inf" if bound is None else repr(float(bound))
        if index not in exemplars:
            buckets.append((shown, float(total)))
            continue
        value, of = exemplars[index]
        labels = {"request_id": format_request_id(of.request_id)}
        if of.trace_id:
            labels["trace_id"] = of.trace_id
        buckets.append((shown, float(total), Shown(labels, value)))
    return buckets


def model_info() -> InfoFamily:
    """The family of a service that knows what is served."""
    return InfoFamily(
        "penstock_model_info",
        "A model that is served, or that a worker has loaded, with the digest of its weights and Penstock's version.",
        {"model": (), "digest": (), "version": ()},
    )


def dead_letters(*streams: str) -> CounterFamily:
    """The family of a service that reads these streams."""
    return CounterFamily(
        "penstock_dead_letters_total",
        "Messages that could not be read and were put into the stream `dead` with the reason.",
        {"stream": streams},
    )
