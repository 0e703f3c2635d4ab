from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from contract.domain.errors import Fault, PenstockError
from servicekit import settings
from servicekit.settings import (
    ServiceSettings,
    load,
    options,
    reachable_address,
    service_variables,
    split_address,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tank(ServiceSettings):
    """How a tank is filled."""

    fluid: str = field(metadata={"help": "what flows, 100 % of it"})
    litres: Annotated[int, msgspec.Meta(ge=1)] = field(default=10, metadata={"help": "how much"})
    limit: float | None = field(default=None, metadata={"help": "how much at most"})
    valves: tuple[int, ...] = field(default=(1, 2), metadata={"help": "which are open"})
    heated: bool = field(default=True, metadata={"help": "whether it is warm"})
    shape: Literal["round", "square"] = field(default="round", metadata={"help": "seen from above"})
    drawing: Path | None = field(default=None, metadata={"help": "file"})


def test_defaults_apply_where_nothing_is_said() -> None:
    assert load(Tank, ["--fluid", "water"], {}).litres == 10


def test_flags_are_converted_to_the_types_of_the_fields() -> None:
    argv = ["--fluid=oil", "--litres", "7", "--limit", "2.5", "--valves", "3, 4", "--no-heated", "--shape", "square"]
    tank = load(Tank, [*argv, "--drawing", "a/b.svg"], {})
    assert (tank.litres, tank.limit, tank.valves, tank.heated, tank.shape) == (7, 2.5, (3, 4), False, "square")
    assert tank.drawing == Path("a/b.svg")


def test_the_environment_is_converted_too_and_a_flag_wins_over_it() -> None:
    environ = {
        "PENSTOCK_FLUID": "oil",
        "PENSTOCK_LITRES": "7",
        "PENSTOCK_HEATED": "false",
        "PENSTOCK_LIMIT": "none",
        "PENSTOCK_VALVES": "",
        "HOME": "/",
    }
    tank = load(Tank, ["--litres=8"], environ)
    assert (tank.fluid, tank.litres, tank.heated, tank.limit, tank.valves) == ("oil", 8, False, None, ())


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        ([], {}, "--fluid (or PENSTOCK_FLUID) is required"),
        (["--fluid=a", "--flow=b"], {}, "--flow"),
        (["--flui=a"], {}, "--flui"),  # no abbreviations: a later flag could make them ambiguous
        (["--fluid=a", "--litres=0"], {}, "--litres='0'"),
        (["--fluid=a", "--litres=many"], {}, "--litres='many'"),
        (["--fluid=a", "--shape=oval"], {}, "--shape='oval'"),
        (["--fluid=a", "--valves=1,x"], {}, "--valves='1,x'"),
        (["--fluid=a"], {"PENSTOCK_LITRES": "-1"}, "PENSTOCK_LITRES='-1'"),
        (["--fluid=a"], {"PENSTOCK_HEATED": "warm"}, "PENSTOCK_HEATED='warm'"),
        (["--fluid=a"], {"PENSTOCK_LITERS": "1"}, "PENSTOCK_LITERS"),
        (["--fluid=a", "--num-shards=0"], {}, "--num-shards='0'"),
        (["--fluid=a", "--pool=a{b}"], {}, "--pool='a{b}'"),
    ],
)
def test_what_is_unknown_missing_or_malformed_is_named(
    argv: list[str], environ: dict[str, str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        load(Tank, argv, environ)
    assert end.value.code == 2
    assert named in capsys.readouterr().err


def test_a_variable_of_another_services_settings_is_left_alone() -> None:
    assert "PENSTOCK_MAX_BODY_BYTES" in service_variables()
    load(Tank, ["--fluid=a"], {"PENSTOCK_MAX_BODY_BYTES": "not even a number"})


def test_help_shows_meaning_default_and_variable_of_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        load(Tank, ["--help"], {})
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "what flows, 100 % of it [required; PENSTOCK_FLUID]" in shown
    assert "which are open [1,2; PENSTOCK_VALVES]" in shown
    assert "whether it is warm [true; PENSTOCK_HEATED]" in shown
    assert "{round,square}" in shown
    for option in options(Tank).values():
        assert option.flag in shown
        assert option.help


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:0", ("::1", 0)),
        (":9", ("", 9)),
        ("host.name:65535", ("host.name", 65535)),
    ],
)
def test_addresses_are_host_and_port(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["", "host", "host:", "host:http", "host:65536", "host:-1"])
def test_what_is_no_address_is_the_operators_fault(address: str) -> None:
    with pytest.raises(PenstockError, match="host:port") as caught:
        split_address(address)
    assert caught.value.fault is Fault.OPERATOR


def test_a_wildcard_is_reached_by_the_hosts_name() -> None:
    host, port = split_address(reachable_address("0.0.0.0:5"))
    assert (host not in ("", "0.0.0.0"), port) == (True, 5)
    assert reachable_address("10.0.0.1:5") == "10.0.0.1:5"


def test_a_server_that_takes_a_free_port_has_no_address_yet() -> None:
    assert reachable_address("0.0.0.0:0") == ""


def test_the_key_of_commands_that_call_a_gateway_is_left_alone() -> None:
    assert load(Tank, ["--fluid=a"], {"PENSTOCK_API_KEY": "psk_x"}) == load(Tank, ["--fluid=a"], {})


@pytest.mark.parametrize(("quota", "most"), [("150000 100000", 1.5), ("max 100000", float("inf")), ("", float("inf"))])
def test_a_containers_quota_bounds_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, most: float
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(settings, "_CPU_QUOTA", tmp_path / "absent")
    cores = settings.num_cores()
    assert cores >= 1
    monkeypatch.setattr(settings, "_CPU_QUOTA", tmp_path / "cpu.max")
    assert settings.num_cores() == min(cores, most)


KUBERNETES = {
    "PENSTOCK_PORT": "tcp://10.96.7.1:8000",
    "PENSTOCK_SERVICE_HOST": "10.96.7.1",
    "PENSTOCK_SERVICE_PORT": "8000",
    "PENSTOCK_SERVICE_PORT_HTTP": "8000",
    "PENSTOCK_PORT_8000_TCP": "tcp://10.96.7.1:8000",
    "PENSTOCK_PORT_8000_TCP_PROTO": "tcp",
    "PENSTOCK_PORT_8000_TCP_PORT": "8000",
    "PENSTOCK_PORT_8000_TCP_ADDR": "10.96.7.1",
    "PENSTOCK_REDIS_SERVICE_HOST": "fd00::7",
    "PENSTOCK_REDIS_PORT": "tcp://[fd00::7]:6379",
}


def test_what_kubernetes_injects_for_a_service_is_ignored_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert load(Tank, [], KUBERNETES | {"PENSTOCK_FLUID": "oil"}).fluid == "oil"
    (line,) = capsys.readouterr().err.splitlines()
    assert "Kubernetes" in line
    assert all(name in line for name in KUBERNETES)


@pytest.mark.parametrize(
    ("name", "value"),
    [("PENSTOCK_PORT", "8000"), ("PENSTOCK_SERVICE_PORT", "http"), ("PENSTOCK_SERVICE_HOST", "gateway.example")],
)
def test_what_only_looks_like_it_is_an_error(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(Tank, ["--fluid=oil"], {name: value})
    assert name in capsys.readouterr().err
