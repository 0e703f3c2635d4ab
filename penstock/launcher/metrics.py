"""The metrics of all processes on one port."""

import ssl
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from penstock.launcher.layout import Child
from servicekit.metric_families import Family, GaugeFamily
from servicekit.metrics import MetricsEndpoint, ProcessHealth
from servicekit.settings import ServiceSettings
from servicekit.tls import open_identity
from servicekit.tls_files import TlsFiles

OPENMETRICS = "application/openmetrics-text; version=1.0.0"  # has all that there is: units, exemplars
ANSWER_S = 2.0  # for which a process is waited for; the others are told without it
PROCESS = "process"  # the label that says whose a figure is
UP = GaugeFamily("penstock_up", "Whether a process tells its metrics: 1 or 0.", {PROCESS: ()})
FAMILIES: tuple[Family, ...] = (UP,)


class PipelineCollector(Collector):
    """The metrics of each process's own endpoint, with its name as a label."""

    def __init__(self, children: Sequence[Child], tls: TlsFiles | None, token_file: Path | None) -> None:
        self._children = children
        self._tls = tls
        self._token_file = token_file

    def collect(self) -> Iterable[Metric]:
        """Asks all of them at once. Who does not answer has `penstock_up` 0 and nothing else."""
        with ThreadPoolExecutor(len(self._children)) as pool:
            pages = list(pool.map(self._fetch, self._children))
        families: dict[str, Metric] = {}
        for child, page in zip(self._children, pages, strict=True):
            for family in page or ():
                same = Metric(family.name, family.documentation, family.type, family.unit)
                merged = families.setdefault(family.name, same)
                for sample in family.samples:
                    labels = {**sample.labels, PROCESS: child.name}
                    merged.samples.append(sample._replace(labels=labels))
        names = (child.name for child in self._children)
        yield UP.by({name: float(page is not None) for name, page in zip(names, pages, strict=True)})
        yield from families.values()

    def _fetch(self, child: Child) -> list[Metric] | None:
        scheme, context, headers = "http", None, {"Accept": OPENMETRICS}
        try:
            if self._tls is not None:
                scheme, context = "https", _own_context(self._tls)
            if self._token_file is not None:
                headers["Authorization"] = f"Bearer {self._token_file.read_text('ascii').strip()}"
            asked = urllib.request.Request(f"{scheme}://{child.metrics_address}/metrics", headers=headers)
            with urllib.request.urlopen(asked, timeout=ANSWER_S, context=context) as reply:
                families = text_string_to_metric_families(reply.read().decode())  # type: ignore[no-untyped-call]
                page = list(families)
        except (OSError, ValueError):  # it starts, or has died, which the launcher says elsewhere
            return None
        return page


def open_endpoint(
    address: str, children: Sequence[Child], vitals: ProcessHealth, settings: ServiceSettings
) -> MetricsEndpoint:
    """Serves them, with the token and the certificate that the processes have too.

    Raises:
        PenstockError: INTERNAL (the operator's fault): the address is taken, or a file cannot be used.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PipelineCollector(children, settings.tls_files, settings.metrics_token_file))
    return MetricsEndpoint(address, registry, vitals, settings.metrics_token, open_identity(settings.tls_files))


def _own_context(files: TlsFiles) -> ssl.SSLContext:
    """For the launcher's own children on this machine: shows their certificate, and does not ask for whom theirs is."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(files.cert, files.key)
    return context
