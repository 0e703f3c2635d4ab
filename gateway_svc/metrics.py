"""A gateway's counts as Prometheus metrics."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway_svc.core.stats import BOUNDS_S, Durations, GatewayStats, Outcome
from servicekit.hops import cumulative


class GatewayCollector(Collector):
    """`penstock_*` of a gateway, read at each scrape."""

    def __init__(self, stats: Callable[[], GatewayStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        stats = self._stats()
        requests = CounterMetricFamily("penstock_requests", "Ended requests.", labels=["outcome"])
        for outcome in Outcome:
            requests.add_metric([outcome.value], stats.outcomes[outcome])
        yield requests
        depth = GaugeMetricFamily("penstock_queue_depth", "Entries that wait in a stream.", labels=["stream"])
        for stream, length in list(stats.queue_depths.items()):
            depth.add_metric([stream], length)
        yield depth
        yield GaugeMetricFamily(
            "penstock_waiting_requests", "Requests of the pool that wait for their first slot.", value=stats.num_waiting
        )
        yield GaugeMetricFamily(
            "penstock_waiting_tokens", "Tokens of their prompts; of text, an estimate until it is tokenized.",
            value=stats.num_waiting_tokens,
        )  # fmt: skip
        dead = CounterMetricFamily("penstock_dead_letters", "Messages that could not be read.", labels=["stream"])
        dead.add_metric(["text"], stats.num_dead_letters)
        yield dead
        rows = CounterMetricFamily(
            "penstock_text_rows", "Text rows by what became of them; behind: asked for again.", labels=["result"]
        )
        for result, count in (
            ("taken", stats.num_rows),
            ("known", stats.num_known_rows),
            ("behind", stats.num_behind_rows),
            ("stray", stats.num_stray_rows),
        ):
            rows.add_metric([result], count)
        yield rows
        yield CounterMetricFamily(
            "penstock_delivered_tokens", "Output tokens handed to clients.", value=stats.num_tokens
        )
        yield CounterMetricFamily("penstock_attaches", "Times that text was asked for again.", value=stats.num_attaches)
        yield CounterMetricFamily(
            "penstock_resumes", "Times that a client came back to a request.", value=stats.num_resumes
        )
        yield GaugeMetricFamily(
            "penstock_detached_calls", "Calls that wait for their client to come back.", value=stats.num_detached
        )
        yield CounterMetricFamily(
            "penstock_lagging_clients", "Times that a client was too slow to keep its text here.",
            value=stats.num_lagging,
        )  # fmt: skip
        reloads = CounterMetricFamily(
            "penstock_api_key_reloads", "Readings of the API keys file; broken: the keys before it stayed valid.",
            labels=["result"],
        )  # fmt: skip
        reloads.add_metric(["taken"], stats.num_key_reloads)
        reloads.add_metric(["broken"], stats.num_broken_key_reloads)
        yield reloads
        yield GaugeMetricFamily("penstock_open_streams", "Requests being served.", value=stats.num_streams)
        yield _histogram(
            "penstock_time_to_first_token_seconds", "From arrival to the first token.", stats.time_to_first_token
        )
        yield _histogram("penstock_inter_token_seconds", "Between tokens of one request.", stats.inter_token)
        yield _histogram("penstock_request_seconds", "From arrival to the end of an answered request.", stats.request)


def _histogram(name: str, documentation: str, durations: Durations) -> Metric:
    family = HistogramMetricFamily(name, documentation)
    family.add_metric([], cumulative(BOUNDS_S, list(durations.counts)), durations.sum_s)
    return family
