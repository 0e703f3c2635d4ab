"""A real Prometheus that scrapes one page, and what it can be asked."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any, Self

from penstock.launcher.ports import free_ports

PROGRAM = "prometheus"
_ASK_S = 60.0
_START_S = 300.0
_STOP_S = 300.0
_PAUSE_S = 0.05


def is_installed() -> bool:
    """Return whether there is one on this machine; Debian's package has it."""
    return shutil.which(PROGRAM) is not None


@dataclass(frozen=True)
class Series:
    """One series that a query found."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]  # unix seconds and value, without what is no number


class Prometheus:
    """A server of its own; answers within the `with`, and ends with it."""

    def __init__(
        self,
        folder: Path,
        metrics_port: int,
        *,
        scrape_s: int,
        rules: Path | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Starts it.

        Args:
            folder: for its data, configuration and log.
            metrics_port: of 127.0.0.1, which it scrapes.
            scrape_s: seconds between two scrapes.
            rules: a file of rules, which it evaluates each second.
            labels: that every series gets.
        """
        (self._port,) = free_ports(1)
        target = {"targets": [f"127.0.0.1:{metrics_port}"], "labels": dict(labels or {})}
        config = {
            "global": {
                "scrape_interval": f"{scrape_s}s",
                "scrape_timeout": f"{scrape_s}s",
                "evaluation_interval": "1s",
            },
            "rule_files": [str(rules)] if rules else [],
            "scrape_configs": [{"job_name": "penstock", "static_configs": [target]}],
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prometheus.json").write_text(json.dumps(config))
        self.log_path = folder / "prometheus.log"
        command = [
            PROGRAM,
            f"--config.file={folder}/prometheus.json",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{self._port}",
            "--enable-feature=exemplar-storage",
        ]
        with self.log_path.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def __enter__(self) -> Self:
        """Waits until it answers: until then it refuses every question with 503.

        Raises:
            RuntimeError: it ended, or did not answer within five minutes.
        """
        deadline_s = time.monotonic() + _START_S
        while not _is_ready(self._port):
            if self._process.poll() is not None or time.monotonic() >= deadline_s:
                self.__exit__()
                raise RuntimeError(f"{PROGRAM} does not answer:\n{self.log_path.read_text()}")
            time.sleep(_PAUSE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, path: str, **arguments: str) -> Any:
        """The answer of its API.

        Raises:
            ValueError: it does not understand the question.
        """
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=_ASK_S) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{arguments}: {error.read().decode()}") from error

    def values(self, query: str) -> list[float]:
        """The values of a query now, without what is no number: a ratio of nothing to nothing."""
        return [value for each in self.now(query) for _, value in each.points]

    def now(self, query: str, at_s: float | None = None) -> list[Series]:
        """The answer to a query now, or at a time (unix seconds)."""
        arguments = {} if at_s is None else {"time": str(at_s)}
        found = self.ask("query", query=query, **arguments)["result"]
        return [_series(each["metric"], [each["value"]]) for each in found]

    def range(self, query: str, start_s: float, end_s: float, step_s: float) -> list[Series]:
        """The answer to a query over a time, unix seconds."""
        found = self.ask("query_range", query=query, start=str(start_s), end=str(end_s), step=str(step_s))["result"]
        return [_series(each["metric"], each["values"]) for each in found]


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=_ASK_S):
            return True
    except OSError:
        return False


def _series(labels: Mapping[str, str], values: list[tuple[float, str]]) -> Series:
    points = ((float(at), float(value)) for at, value in values)
    return Series(labels, tuple((at, value) for at, value in points if not isnan(value)))
