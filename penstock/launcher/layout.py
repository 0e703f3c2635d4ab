"""The options of `penstock serve`, and the processes that follow from them."""

import argparse
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import msgspec

import penstock
from penstock.launcher.ports import Listener, bind, free_ports, ports_from
from servicekit.bus.calls import SessionKind
from servicekit.config_file import add_config
from servicekit.settings import (
    WILDCARD_HOSTS,
    Option,
    ServiceSettings,
    add_flags,
    expanded,
    options,
)

BUNDLED_MODEL = Path(penstock.__file__).parent / "bundled_model"
BUNDLED_NAME = "penstock-bundled"  # what clients call it
DRAIN_TIMEOUT_S = 10.0  # someone waits at the terminal

# In the order in which they are stopped: who feeds the others goes first.
KINDS = (
    SessionKind.GATEWAY,
    SessionKind.TOKENIZER,
    SessionKind.SCHEDULER,
    SessionKind.WORKER,
    SessionKind.DETOKENIZER,
)
_DECIDED_HERE = frozenset(
    {
        *("redis_url", "name", "model", "rank"),
        *("grpc_address", "metrics_address", "health_address", "grpc_health_address"),
        *("http_address", "distributed_address"),
    }
)


_DOORS = ("control_token_file", "metrics_token_file", "tls_cert", "tls_key", "tls_client_ca")
_Count = Annotated[int, msgspec.Meta(ge=1, le=64)]
_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """Starts the whole pipeline on this machine and serves until Ctrl-C.

    Flags of the services are passed on to those that have them.
    """

    model: str = field(
        default=str(BUNDLED_MODEL),
        metadata={
            "help": "directory of a checkpoint in Hugging Face layout, or a hub id; by default the bundled model"
        },
    )
    host: str = field(default="127.0.0.1", metadata={"help": "where gateways listen; 0.0.0.0: everywhere"})
    port: _Port = field(
        default=8000,
        metadata={"help": "port of the OpenAI HTTP API; further gateways take the next ones; 0: free ones"},
    )
    grpc_port: _Port = field(
        default=50051, metadata={"help": "port of the gRPC API; further gateways take the next ones; 0: free ones"}
    )
    metrics_port: _Port = field(
        default=0,
        metadata={"help": "port of the metrics of all processes together, with their names as a label; 0: none"},
    )
    first_port: _Port = field(
        default=0,
        metadata={
            "help": "first of the ports of 127.0.0.1 for what nobody calls from outside, the same for "
            "the same numbers of processes; 0: free ones"
        },
    )
    redis_url: str | None = field(
        default=None,
        repr=False,
        metadata={"help": "a server that runs already; without it, one is started for this pipeline"},
    )
    data_dir: Path | None = field(
        default=None, metadata={"help": "where the started server keeps its data; without it, nothing is kept"}
    )
    gateways: _Count = field(default=1, metadata={"help": "processes of gateway_svc"})
    tokenizers: _Count = field(default=1, metadata={"help": "processes of tokenizer_svc"})
    schedulers: _Count = field(default=1, metadata={"help": "processes of scheduler_svc"})
    workers: Annotated[int, msgspec.Meta(ge=0, le=64)] = field(
        default=1, metadata={"help": "processes of worker_svc; 0: workers run elsewhere, requests wait for one"}
    )
    detokenizers: _Count = field(default=1, metadata={"help": "processes of detokenizer_svc"})
    max_restart_pause_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = field(
        default=8.0, metadata={"help": "longest wait before a process that died again and again is started once more"}
    )


@dataclass(frozen=True, slots=True)
class Child:
    """One process to run."""

    kind: SessionKind
    name: str
    flags: tuple[str, ...]
    grpc_address: str
    http_address: str  # of a gateway; empty: none
    metrics_address: str
    health_address: str  # where the launcher asks how it is
    session_name: str  # how the pool knows it
    control_token_file: str  # what its control service asks for; empty: nothing
    # In its environment: everybody on the machine may read command lines, and a URL may hold a password.
    redis_url: str = field(repr=False)

    @property
    def module(self) -> str:
        """The module that is run with `python -m`."""
        return f"{self.kind.value}_svc"


@dataclass(frozen=True, slots=True)
class Launch:
    """The values that the command line asked for."""

    settings: LaunchSettings
    passed_on: Mapping[SessionKind, tuple[str, ...]]  # flags for every process of a service
    drain_timeout_s: float
    log_format: str
    pool: str
    world_size: int  # processes of one worker
    model_name: str  # what clients call the model
    control_token_file: Path | None  # what control services ask for
    has_keys: bool  # callers need API keys
    metrics: ServiceSettings  # token and certificate of the metrics of all
    redis_url: str | None = field(repr=False)  # with its password; None: a server is to be started

    def count(self, kind: SessionKind) -> int:
        """The number of processes of a service."""
        replicas: int = getattr(self.settings, f"{kind.value}s")
        return replicas * self.world_size if kind is SessionKind.WORKER else replicas


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Launch:
    """The command line of `penstock serve`.

    Raises:
        SystemExit: status 2 with a message that names an unknown or malformed flag; status 0 after `--help`.
    """
    parser = argparse.ArgumentParser(
        prog="penstock serve",
        usage="%(prog)s [--FLAG VALUE …]",
        description=LaunchSettings.__doc__,
        allow_abbrev=False,
    )
    own = options(LaunchSettings)
    add_config(parser)
    add_flags(parser, own.values(), with_variables=False)
    services = {kind: _service_options(kind) for kind in KINDS}
    shared = options(ServiceSettings)
    offered: dict[str, Option] = {}
    everyone = parser.add_argument_group("all services")
    _offer(everyone, (option for name, option in shared.items() if name not in _DECIDED_HERE), offered)
    for kind, known in services.items():
        _offer(parser.add_argument_group(f"{kind.value}_svc"), known.values(), offered)
    arguments = expanded(parser, argv, (*own.values(), *offered.values()))
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    given.pop("config", None)
    # Defaults that differ from those of a service that runs alone.
    model_name = _served_name(given.get("model", str(BUNDLED_MODEL)))
    defaults = {"drain_timeout_s": str(DRAIN_TIMEOUT_S), "log_format": "console", "pool": offered["pool"].default}
    if not (given.get("pools") or environ.get(offered["pools"].variable)):  # else their file names models
        defaults["served_model_name"] = model_name
    for name, default in defaults.items():
        given.setdefault(name, environ.get(offered[name].variable, default))
    if (url := environ.get(shared["redis_url"].variable)) is not None:
        given.setdefault("redis_url", url)
    values: dict[str, Any] = {}
    for option in (*own.values(), *offered.values()):
        text = given.get(option.name)
        try:
            values[option.name] = option.convert(text) if isinstance(text, str) else text
        except msgspec.ValidationError as error:
            parser.error(f"{option.flag}={text!r}: {option.explain(error)}")
    # What is decided for each process is not passed on as it came: a URL may hold a password.
    common = {name: value for name, value in given.items() if name not in _DECIDED_HERE}
    doors: dict[str, Any] = {name: values[name] or _path(environ.get(offered[name].variable)) for name in _DOORS}
    return Launch(
        settings=LaunchSettings(**{name: values[name] for name in own if name in given}),
        passed_on={kind: _flags(known, common) for kind, known in services.items()},
        drain_timeout_s=values["drain_timeout_s"],
        log_format=values["log_format"],
        pool=values["pool"],
        world_size=values["tensor_parallel_size"] or 1,
        model_name=given.get("served_model_name", model_name).partition(",")[0],
        control_token_file=doors.pop("control_token_file"),
        metrics=ServiceSettings(**doors),
        has_keys=bool(values["api_keys_file"] or environ.get(offered["api_keys_file"].variable)),
        redis_url=_bus_url(values["redis_url"], values["redis_password_file"]),
    )


def children(launch: Launch, redis_url: str, made_token_file: Path | None = None) -> list[Child]:
    """The processes, each with addresses of its own.

    `made_token_file`: of a control token that was made for this launch, as none was given.
    """
    settings = launch.settings
    # A pool that others share must not see two workers of one name.
    prefix = f"{socket.gethostname()}-{os.getpid()}-" if settings.redis_url else ""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    wanted = 3 * sum(map(launch.count, KINDS)) + 2 * settings.gateways + settings.workers
    free = ports_from(settings.first_port, wanted) if settings.first_port else free_ports(wanted)
    token_file = str(made_token_file or launch.control_token_file or "")
    made = []
    for kind in KINDS:
        known = _service_options(kind)
        meeting = ""
        for number in range(launch.count(kind)):
            index, rank = divmod(number, launch.world_size if kind is SessionKind.WORKER else 1)
            name, label = f"{prefix}{kind.value}-{index}", f"{kind.value}-{index}"
            grpc_address, http_address = f"127.0.0.1:{free.pop()}", ""
            if kind is SessionKind.GATEWAY:
                http_address = f"{host}:{settings.port + index if settings.port else free.pop()}"
                grpc_address = f"{host}:{settings.grpc_port + index if settings.grpc_port else free.pop()}"
            if kind is SessionKind.WORKER and launch.world_size > 1:
                label = f"{label}.{rank}"
                meeting = meeting if rank else f"tcp://127.0.0.1:{free.pop()}"
            metrics_address, health_address = (f"127.0.0.1:{free.pop()}" for _ in range(2))
            decided: dict[str, Any] = {
                "name": name,
                "grpc_address": grpc_address,
                "metrics_address": metrics_address,
                "health_address": health_address,
                "http_address": http_address,
                "model": settings.model,
                "rank": rank,
                "distributed_address": meeting,
                "control_token_file": made_token_file,
            }
            flags = (*_flags(known, decided), *launch.passed_on[kind])
            addresses = (grpc_address, http_address, metrics_address, health_address)
            made.append(Child(kind, label, flags, *addresses, f"{prefix}{label}", token_file, redis_url))
    return made


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _bus_url(redis_url: str | None, password_file: Path | None) -> str | None:
    return redis_url and ServiceSettings(redis_url=redis_url, redis_password_file=password_file).bus_url


def _served_name(model: str) -> str:
    """The name by which clients call a model: a hub id as it is, a directory by its name."""
    if model == str(BUNDLED_MODEL):
        return BUNDLED_NAME
    return Path(model).resolve().name if Path(model).is_dir() else model


def callable_address(address: str) -> str:
    """The address under which this machine calls a server that listens on `address`."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host.strip("[]") in WILDCARD_HOSTS else address


def check_free(children: Iterable[Child]) -> None:
    """Makes sure that nobody listens where services are to: whoever answers there would be taken for them.

    Raises:
        PenstockError: INTERNAL (the operator's fault): a port is taken, or the address is not one of this machine.
    """
    bind(_addresses(children)).close()


def hold_ports(children: Iterable[Child]) -> ExitStack:
    """As `check_free`, and until it is closed other launchers' `free_ports` does not find these ports, before a service
    listens and while it is started again. On Linux; elsewhere no service could listen on a port that is held.

    Raises:
        PenstockError: see `check_free`.
    """
    held = bind(_addresses(children))
    if sys.platform != "linux":
        held.close()
    return held


def _addresses(children: Iterable[Child]) -> Iterator[Listener]:
    """Where services listen for calls and for questions about themselves."""
    for child in children:
        inner = "first-port"
        grpc_port = "grpc-port" if child.http_address else inner
        for what, address in (
            ("port", child.http_address),
            (grpc_port, child.grpc_address),
            (inner, child.metrics_address),
            (inner, child.health_address),
        ):
            if address:
                yield Listener(child.name, address, what)


def _service_options(kind: SessionKind) -> dict[str, Option]:
    module = import_module(f"{kind.value}_svc.settings")
    return options(getattr(module, f"{kind.value.capitalize()}Settings"))


def _offer(group: argparse._ActionsContainer, known: Iterable[Option], offered: dict[str, Option]) -> None:
    """Adds the flags that nobody has offered yet."""
    new = [option for option in known if option.name not in offered and option.name not in _DECIDED_HERE]
    add_flags(group, new)
    offered.update({option.name: option for option in new})


def _flags(known: Mapping[str, Option], given: Mapping[str, Any]) -> tuple[str, ...]:
    """Command-line flags for those of the given values that a service knows."""
    made: list[str] = []
    for name, value in given.items():
        if name not in known or value in (None, ""):
            continue
        if isinstance(value, bool):
            made.append(known[name].flag if value else known[name].flag.replace("--", "--no-", 1))
        else:
            # One word: a value may begin with a dash.
            made.append(f"{known[name].flag}={value}")
    return tuple(made)


def python_command(child: Child) -> list[str]:
    """The command that runs a child of this process."""
    return [sys.executable, "-m", "penstock.launcher.child", str(os.getpid()), child.module, *child.flags]
