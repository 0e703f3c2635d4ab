"""Settings: frozen dataclasses, built once in `__main__` from flags and the environment, strict about both.

Every field `some_field` is the flag `--some-field`, the line `some-field: VALUE` of a file that `--config` names, and
the variable `PENSTOCK_SOME_FIELD`; a flag wins, then the file. Values are converted to the field's type and checked
against its constraints by msgspec. Lists are separated by commas; `none` is None where the type allows it; a boolean
is `--flag` or `--no-flag`, and `true` or `false` in a file and in the environment.

All services may share one environment: a variable that another service's settings have is left alone, one that
nobody has is an error. The one from which commands take their API key is left alone, too, and so is what Kubernetes
injects for Services whose names begin with `penstock`.
"""

import argparse
import dataclasses
import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec

from contract.domain.api_keys import API_KEY_VARIABLE
from contract.domain.errors import ErrorCode, PenstockError
from servicekit.config_file import add_config, expand_config
from servicekit.kubernetes import ignored_line, injected
from servicekit.tls_files import TlsFiles
from servicekit.tokens import TokenFile, open_token

S = TypeVar("S")

PREFIX = "PENSTOCK_"
SETTINGS_GROUP = "penstock.settings"  # entry points, one for the settings of each service
WILDCARD_HOSTS = ("", "0.0.0.0", "::", "*")

# Looking for something without sleeping saves a wake-up; where cores are few, others need the one that looks.
POLLING_CORES = 8
AWAKE_CORES = 16
STAY_AWAKE_MS = 1000
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of CPU time in each period, and the period


def num_cores() -> float:
    """Cores' worth of time that this process may use: bound by its affinity, and by its container's quota."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = _CPU_QUOTA.read_text("ascii").split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # not Linux, another version of cgroups, or "max"
        return cores


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Settings of every service; a service's own are a subclass with further fields."""

    redis_url: str = field(
        default="redis://127.0.0.1:6379/0",
        repr=False,
        metadata={
            "help": "Redis or Valkey server: redis://, rediss://, unix:// or sentinel://; best in the environment"
        },
    )
    redis_password_file: Path | None = field(
        default=None,
        metadata={"help": "file that holds the password for the server, instead of the URL; read for each connection"},
    )
    pool: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = field(
        default="penstock", metadata={"help": "name of the pool of services that serve one model together"}
    )
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,128}$")] = field(
        default_factory=socket.gethostname,
        metadata={"help": "what this process is called; no two living workers of a pool may share a name"},
    )
    grpc_address: str = field(
        default="127.0.0.1:0", metadata={"help": "host:port of the gRPC server; port 0 takes a free one"}
    )
    metrics_address: str = field(
        default="", metadata={"help": "host:port of the Prometheus endpoint /metrics; empty: none"}
    )
    health_address: str = field(
        default="",
        metadata={"help": "host:port where /health and /ready are without key and TLS, and nothing else; empty: none"},
    )
    grpc_health_address: str = field(
        default="", metadata={"help": "host:port where grpc.health.v1 is, the same way; empty: none"}
    )
    tls_cert: Path | None = field(
        default=None,
        metadata={
            "help": "PEM file of the certificate of HTTP, gRPC and metrics, read again when it changes; none: no TLS"
        },
    )
    tls_key: Path | None = field(default=None, metadata={"help": "PEM file of its key"})
    tls_client_ca: Path | None = field(
        default=None,
        metadata={"help": "PEM file of who signs the certificates that clients must show; none: they need none"},
    )
    control_token_file: Path | None = field(
        default=None,
        metadata={
            "help": "file of a token that gRPC calls of control services need, health and reflection aside; none: "
            "whoever reaches the port may control the service"
        },
    )
    metrics_token_file: Path | None = field(
        default=None, metadata={"help": "file of a token that /metrics needs as Authorization: Bearer; none: open"}
    )
    log_level: Literal["debug", "info", "warning", "error"] = field(
        default="info", metadata={"help": "what is logged at least"}
    )
    log_format: Literal["auto", "json", "console"] = field(
        default="auto", metadata={"help": "JSON lines or readable ones; auto: readable on a terminal"}
    )
    session_ttl_s: Annotated[float, msgspec.Meta(ge=0.5, le=600)] = field(
        default=1.5, metadata={"help": "seconds without renewal after which others take over what this process held"}
    )
    drain_timeout_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = field(
        default=30.0, metadata={"help": "seconds that SIGTERM leaves for what is in flight"}
    )
    stay_awake_ms: Annotated[int, msgspec.Meta(ge=0, le=1000)] = field(
        default_factory=lambda: STAY_AWAKE_MS if num_cores() >= AWAKE_CORES else 0,
        metadata={"help": "milliseconds after a request for which a service that is idle looks for the next one"},
    )
    num_shards: Annotated[int, msgspec.Meta(ge=1, le=1024)] = field(
        default=4, metadata={"help": "shards of the token log; the same number in all services of a pool"}
    )

    @property
    def tls_files(self) -> TlsFiles | None:
        """The certificate of servers, and what they ask of their clients; None: no TLS.

        Raises:
            PenstockError: INTERNAL (the operator's fault): one of the files is not named.
        """
        if self.tls_cert is not None and self.tls_key is not None:
            return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)
        if self.tls_cert is None and self.tls_key is None and self.tls_client_ca is None:
            return None
        raise PenstockError(ErrorCode.INTERNAL, "TLS needs --tls-cert and --tls-key, both of them")

    @property
    def control_token(self) -> TokenFile | None:
        """The token that control services ask for; None: none.

        Raises:
            PenstockError: INTERNAL (the operator's fault): it cannot be used.
        """
        return open_token(self.control_token_file, "--control-token-file")

    @property
    def metrics_token(self) -> TokenFile | None:
        """The token that `/metrics` asks for; None: none.

        Raises:
            PenstockError: INTERNAL (the operator's fault): it cannot be used.
        """
        return open_token(self.metrics_token_file, "--metrics-token-file")

    @property
    def bus_url(self) -> str:
        """The server's URL; it names the file of its password, if there is one, which is read before each connection.

        Raises:
            PenstockError: INTERNAL (the operator's fault): the file cannot be read.
        """
        if self.redis_password_file is None:
            return self.redis_url
        path = self.redis_password_file.absolute()
        try:
            path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise PenstockError(ErrorCode.INTERNAL, f"redis_password_file cannot be read: {error}") from error
        url = urlsplit(self.redis_url)
        query = "&".join(part for part in (url.query, f"password_file={quote(str(path))}") if part)
        return urlunsplit(url._replace(query=query))


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a settings class, as users name it."""

    name: str
    type: Any
    default: Any  # dataclasses.MISSING: the value must be given
    help: str

    @property
    def flag(self) -> str:
        """`--some-field`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """`PENSTOCK_SOME_FIELD`."""
        return PREFIX + self.name.upper()

    @property
    def is_bool(self) -> bool:
        """Return whether it is a switch without a value."""
        return bool in _alternatives(self.type)

    @property
    def choices(self) -> list[str]:
        """The values that there are, if they can be listed."""
        return _choices(self.type)

    def explain(self, error: Exception) -> str:
        """The reason why a value was not taken, for who gave it."""
        return f"choose one of {', '.join(self.choices)}" if self.choices else str(error)

    def convert(self, text: str) -> Any:
        """The value that a text stands for.

        Raises:
            msgspec.ValidationError: not a value of the type, or out of its bounds.
        """
        alternatives = _alternatives(self.type)
        if NoneType in alternatives and text.lower() in ("", "none"):
            return None
        is_list = any(get_origin(each) in (tuple, list, frozenset) for each in alternatives)
        value: Any = [part.strip() for part in text.split(",") if part.strip()] if is_list else text
        return msgspec.convert(value, self.type, strict=False, dec_hook=_decode)


def options(cls: type) -> dict[str, Option]:
    """The options of a settings class by field name, in order."""
    types = get_type_hints(cls, include_extras=True)
    found = {}
    for each in dataclasses.fields(cls):
        default = each.default
        if each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        found[each.name] = Option(each.name, types[each.name], default, each.metadata.get("help", ""))
    return found


def load(cls: type[S], argv: Sequence[str], environ: Mapping[str, str]) -> S:
    """Settings of class `cls` from flags, then the file of `--config`, then environment, then defaults.

    Raises:
        SystemExit: status 2 with a message that names the flag or variable that is unknown, missing or malformed;
            status 0 after `--help`.
    """
    known = options(cls)
    parser = argparse.ArgumentParser(prog=cls.__module__.partition(".")[0], description=cls.__doc__, allow_abbrev=False)
    add_config(parser)
    add_flags(parser, known.values())
    flags = vars(parser.parse_args(expanded(parser, argv, known.values())))
    own = {option.variable for option in known.values()}
    if names := injected(environ, PREFIX):
        sys.stderr.write(ignored_line(names) + "\n")
        environ = {name: value for name, value in environ.items() if name not in names}
    strangers = sorted(name for name in environ if name.startswith(PREFIX) and name not in own | {API_KEY_VARIABLE})
    if strangers:
        strangers = sorted(set(strangers) - service_variables())
    if strangers:
        parser.error(f"no service knows the environment variable {', '.join(strangers)}: correct or unset it")
    values: dict[str, Any] = {}
    for option in known.values():
        source, text = option.flag, flags[option.name]
        if text is None and option.variable in environ:
            source, text = option.variable, environ[option.variable]
        if text is None:
            if option.default is dataclasses.MISSING:
                parser.error(f"{option.flag} (or {option.variable}) is required: {option.help}")
            continue
        try:
            values[option.name] = text if isinstance(text, bool) else option.convert(text)
        except msgspec.ValidationError as error:
            parser.error(f"{source}={text!r}: {option.explain(error)}")
    return cls(**values)


def add_flags(parser: argparse._ActionsContainer, known: Iterable[Option], *, with_variables: bool = True) -> None:
    """Adds one flag for each option; values stay texts (switches become booleans), absent ones are None."""
    for option in known:
        notes = [_show(option.default), *([option.variable] if with_variables else [])]
        text = f"{option.help} [{'; '.join(notes)}]".replace("%", "%%")
        if option.is_bool:
            parser.add_argument(option.flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            choices = option.choices
            metavar = "{" + ",".join(choices) + "}" if choices else option.name.rpartition("_")[2].upper()
            parser.add_argument(option.flag, metavar=metavar, help=text)


def expanded(parser: argparse.ArgumentParser, argv: Sequence[str], known: Iterable[Option]) -> list[str]:
    """The command line with the flags of the file that it names, if it names one.

    Raises:
        SystemExit: status 2 with a message that says what is wrong with the file.
    """
    try:
        return expand_config(argv, {option.flag.removeprefix("--"): option.is_bool for option in known})
    except PenstockError as error:
        parser.error(error.message)


def service_variables() -> set[str]:
    """The variables of all services that are installed: each names its settings as an entry point of its package."""
    return {
        option.variable for entry in entry_points(group=SETTINGS_GROUP) for option in options(entry.load()).values()
    }


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`; an empty host is every interface.

    Raises:
        PenstockError: INTERNAL (the operator's fault): not an address.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise PenstockError(ErrorCode.INTERNAL, f"an address is host:port, got {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def reachable_address(address: str) -> str:
    """The address under which others can call a server that listens on `address`: wildcards become the host's name.

    Empty if the server takes a free port: which one is not known yet.
    """
    host, port = split_address(address)
    if not port:
        return ""
    if host in WILDCARD_HOSTS:
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _alternatives(hint: Any) -> list[Any]:
    """The members of an optional or union type without their annotations; a plain type alone."""
    if get_origin(hint) is Annotated:
        return _alternatives(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [each for member in get_args(hint) for each in _alternatives(member)]
    return [hint]


def _choices(hint: Any) -> list[str]:
    return [str(value) for each in _alternatives(hint) if get_origin(each) is Literal for value in get_args(each)]


def _decode(hint: type, value: Any) -> Any:
    if hint is Path:
        return Path(value)
    raise NotImplementedError(f"settings cannot have the type {hint}")


def _show(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "required"
    if default is None or default == "":
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return ",".join(map(str, default)) if isinstance(default, tuple | list | frozenset) else str(default)
