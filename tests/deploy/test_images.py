"""deploy/Dockerfile, compose.yaml and pin. No image can be built where the tests run: their parts are tried alone."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from servicekit.bus.embedded import find_server
from servicekit.bus.probe import ask
from servicekit.bus.redis_address import RedisAddress
from servicekit.settings import load

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
SERVICES = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")
LIGHT = ("gateway", "tokenizer", "scheduler", "detokenizer")
DIGEST = "sha256:" + "0123456789abcdef" * 4


def stages() -> dict[str, tuple[str, str]]:
    """The base and the instructions of each stage, by its name."""
    found = re.split(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)[1:]
    return {name: (base, body) for base, name, body in zip(found[::3], found[1::3], found[2::3], strict=True)}


def lineage(name: str) -> list[str]:
    """A stage and those that it is made of, as far as they are this file's."""
    names = [name]
    while (base := stages()[names[-1]][0]) in stages():
        names.append(base)
    return names


def test_every_service_has_a_target_that_runs_it_as_nobody() -> None:
    for service in SERVICES:
        text = "".join(stages()[each][1] for each in reversed(lineage(service)))
        assert f'ENTRYPOINT ["python", "-m", "{service}_svc"]' in text
        assert re.findall(r"^USER (\S+)$", text, re.MULTILINE)[-1] == "65532:65532"


@pytest.mark.parametrize("service", LIGHT)
def test_services_without_a_model_have_neither_torch_nor_build_tools(service: str) -> None:
    text = "".join(stages()[each][1] for each in lineage(service))
    (environment,) = re.findall(r"^COPY --from=(\S+) /opt/penstock", text, re.MULTILINE)
    text += "".join(stages()[each][1] for each in lineage(environment))
    assert lineage(environment)[-1] == "light"
    assert not re.search(r"--from=heavy|gcc|apt-get|\[worker|EXTRAS", text)


def test_detokenizers_can_tell_a_collector_of_traces() -> None:
    (environment,) = re.findall(r"^COPY --from=(\S+) /opt/penstock", stages()["detokenizer"][1], re.MULTILINE)
    assert "[otel]" in stages()[environment][1]


def test_bases_are_arguments_and_no_digest_is_in_the_file() -> None:
    assert {base for base, _ in stages().values()} - stages().keys() == {"${PYTHON_IMAGE}"}
    assert "sha256" not in DOCKERFILE
    default = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert default
    assert images()["PYTHON_IMAGE"].partition("@")[0] == default[1]


def test_the_context_of_a_build_is_what_the_wheel_is_made_of() -> None:
    kept = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = re.search(r"\[tool\.hatch\.build\.targets\.wheel\]\npackages = \[(.*?)\]", pyproject(), re.DOTALL)
    assert packages
    assert kept == {*re.findall(r'"(\w+)"', packages[1]), "pyproject.toml", "constraints.txt", "README.md", "LICENSE"}


def pyproject() -> str:
    return (ROOT / "pyproject.toml").read_text()


def test_the_wheel_that_images_install_holds_all_that_services_need(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    place = tmp_path / "installed"
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", place, wheel], check=True)
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import penstock; assert penstock.__file__.startswith(sys.argv[1]), penstock.__file__\n"
        "from servicekit.bus.library import Library\n"
        "from penstock.launcher.layout import BUNDLED_MODEL; assert (BUNDLED_MODEL / 'model.safetensors').is_file()\n"
        f"for name in {LIGHT!r}: __import__(f'{{name}}_svc.__main__')\n"
    )
    environ = os.environ | {"PYTHONPATH": str(place)}
    subprocess.run([sys.executable, "-c", program, str(place)], cwd=tmp_path, env=environ, check=True)


def images() -> dict[str, str]:
    """The images of deploy/images.env."""
    lines = (DEPLOY / "images.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def compose(name: str = "compose.yaml") -> Any:
    """The file as compose reads it with deploy/images.env and nothing else."""

    def value(match: re.Match[str]) -> str:
        return images().get(match[1]) or match[2] or ""

    return yaml.safe_load(re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", value, (DEPLOY / name).read_text()))


def test_compose_runs_every_service_with_settings_that_it_knows(tmp_path: Path) -> None:
    services = compose()["services"]
    for kind in SERVICES:
        service = services[kind]
        assert service["build"]["target"] == kind
        assert service["read_only"]
        settings: Any = load(
            getattr(import_module(f"{kind}_svc.settings"), f"{kind.capitalize()}Settings"),
            service.get("command", []),
            service["environment"],
        )
        grace_s = int(service.get("stop_grace_period", "10s").removesuffix("s"))
        assert grace_s > settings.drain_timeout_s, "else it is killed while it drains"
        assert settings.redis_url == "redis://valkey:6379/0"
    assert compose("compose/gpu.yaml")["services"].keys() <= services.keys()


def test_prometheus_scrapes_every_service_of_compose() -> None:
    (job,) = yaml.safe_load((DEPLOY / "compose" / "prometheus.yaml").read_text())["scrape_configs"]
    assert [each["targets"] for each in job["static_configs"]] == [[f"{kind}:9100"] for kind in SERVICES]


def test_grafana_of_compose_has_the_boards_and_their_data_source() -> None:
    grafana = compose()["services"]["grafana"]
    mounts = {inside: DEPLOY / outside for outside, inside, *_ in (each.split(":") for each in grafana["volumes"])}
    (provider,) = yaml.safe_load(mounts["/etc/grafana/provisioning/dashboards/penstock.yaml"].read_text())["providers"]
    boards = mounts[provider["options"]["path"]]
    assert {path.name for path in boards.iterdir()} == {path.name for path in (DEPLOY / "grafana").iterdir()}
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (mounts[str(home.parent)] / home.name).is_file()
    sources = yaml.safe_load(mounts["/etc/grafana/provisioning/datasources/penstock.yaml"].read_text())["datasources"]
    assert [(each["type"], each["isDefault"]) for each in sources] == [("prometheus", True)]


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[RedisAddress]:
    """A server as compose starts it, at a socket beside."""
    command = compose()["services"]["valkey"]["command"]
    assert command[0] == "valkey-server"
    path = tmp_path / "s"
    where = ["--port", "0", "--unixsocket", str(path), "--dir", str(tmp_path), "--logfile", str(tmp_path / "log")]
    server = subprocess.Popen([find_server(), *command[1:], *where])
    try:
        deadline_s = time.monotonic() + 60
        while not path.exists():
            assert server.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        yield RedisAddress(path=str(path))
    finally:
        server.terminate()
        server.wait(300)


def test_the_server_of_compose_is_what_a_pool_needs(valkey: RedisAddress) -> None:
    wanted = {
        b"appendonly": b"yes",
        b"appendfsync": b"everysec",
        b"auto-aof-rewrite-min-size": str(4 << 30).encode(),
        b"no-appendfsync-on-rewrite": b"yes",
        b"save": b"",
        b"maxmemory-policy": b"noeviction",
    }
    found = ask(valkey, [("CONFIG", "GET", name) for name in wanted])
    assert [tuple(each) for each in found] == list(wanted.items())


def pin(tmp_path: Path, crane: str) -> tuple[subprocess.CompletedProcess[str], str, str]:
    """A run of `deploy/pin` with a program in place of crane; its file before and after."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "crane").write_text(f"#!/bin/sh\n{crane}\n")
    (tools / "crane").chmod(0o755)
    file = tmp_path / "images.env"
    before = (DEPLOY / "images.env").read_text()
    file.write_text(before)
    environ = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    ended = subprocess.run([DEPLOY / "pin", file], env=environ, capture_output=True, text=True, check=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images.env", "tools"], "nothing else is left"
    return ended, before, file.read_text()


def test_pin_writes_the_digests_that_a_registry_tells(tmp_path: Path) -> None:
    ended, before, after = pin(tmp_path, f'[ "$1" = digest ] && echo {DIGEST}')
    assert ended.returncode == 0, ended.stderr
    assert after == re.sub(r"^(\w+=.*)$", rf"\1@{DIGEST}", before, flags=re.MULTILINE)


@pytest.mark.parametrize("crane", ["exit 1", "echo no digest", f'case "$2" in prom*) exit 1;; esac; echo {DIGEST}'])
def test_pin_writes_nothing_unless_every_image_was_answered(tmp_path: Path, crane: str) -> None:
    ended, before, after = pin(tmp_path, crane)
    assert ended.returncode == 1
    assert "images.env is as it was" in ended.stderr
    assert after == before
