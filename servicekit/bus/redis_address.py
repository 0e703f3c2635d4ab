"""The address of a server and how to get in: bus URLs, and the first commands of a connection."""

import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from contract.domain.errors import invalid
from servicekit.bus.commands import Command
from servicekit.bus.redis_credentials import FileCredentials, credentials_of, load_provider

if TYPE_CHECKING:
    from redis.credentials import CredentialProvider

CONNECT_TIMEOUT_S = 5.0
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """One server. `path` is a Unix socket, and then `host` is empty."""

    host: str = ""
    port: int = 6379
    path: str = ""
    username: str = ""
    password: str = ""
    database: int = 0
    tls: ssl.SSLContext | None = None
    tls_options: Mapping[str, str] = field(default_factory=dict)  # what it was made from, for redis-py
    credentials: "FileCredentials | CredentialProvider | None" = None  # instead of user and password: asked each time

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"

    def login(self) -> list[Command]:
        """The commands that a new connection begins with.

        Raises:
            BusUnavailable: there are no credentials at the moment.
        """
        commands: list[Command] = []
        if self.credentials is not None:
            commands.append((b"AUTH", *credentials_of(self.credentials)))
        elif self.password:
            user = (self.username,) if self.username else ()
            commands.append((b"AUTH", *user, self.password))
        if self.database:
            commands.append((b"SELECT", self.database))
        return commands

    def open_socket(self) -> socket.socket:
        """A connected socket; its timeout is that of connecting.

        Raises:
            OSError: the server cannot be reached.
        """
        if self.path:
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            unix.settimeout(CONNECT_TIMEOUT_S)
            try:
                unix.connect(self.path)
            except OSError:
                unix.close()
                raise
            return unix
        plain = socket.create_connection((self.host, self.port), CONNECT_TIMEOUT_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self.tls:
            try:
                return self.tls.wrap_socket(plain, server_hostname=self.host)
            except OSError:
                plain.close()
                raise
        return plain


def parse_address(url: str) -> RedisAddress:
    """The server of a `redis://`, `rediss://`, `valkey://` or `unix://` URL, spelled as redis-py spells them.

    `redis://[[user]:password@]host[:port][/database]`; `rediss://` is the same over TLS, with the optional parameters
    `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` (paths) and `ssl_cert_reqs=none`; `unix://[[user]:password@]/path[?db=N]`.
    Instead of a password: `password_file` (a path) or `credential_provider` (`MODULE:NAME`, see `load_provider`).

    Raises:
        PenstockError: the URL cannot be understood, or a certificate file cannot be read.
    """
    shown = shown_url(url)
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
        path = unquote(parts.path)
        is_unix = parts.scheme == "unix"
        database = int(options.pop("db", "0") if is_unix or "db" in options else path.strip("/") or "0")
        port = parts.port or 6379
    except ValueError as error:
        raise invalid(f"bus URL of {shown!r}: {error}", param="bus_url") from error
    username = unquote(parts.username or "")
    common = take_common(shown, options, username, is_tls=parts.scheme == "rediss")
    if options:
        raise invalid(f"bus URL of {shown!r}: unknown parameter {sorted(options)[0]!r}", param="bus_url")
    if is_unix and not path:
        raise invalid(f"bus URL of {shown!r}: the path of the socket is missing", param="bus_url")
    return replace(
        common,
        host="" if is_unix else parts.hostname or "localhost",
        port=port,
        path=path if is_unix else "",
        username=username,
        password=unquote(parts.password or ""),
        database=database,
    )


def shown_url(url: str) -> str:
    """A URL without its password, for messages."""
    return url.partition("?")[0].rpartition("@")[2]


def take_common(shown: str, options: dict[str, str], username: str, *, is_tls: bool) -> RedisAddress:
    """Takes out of a URL's parameters what every kind of URL may have: TLS, and who is asked for credentials.

    Raises:
        PenstockError: one of them cannot be used.
    """
    tls_options = {name: options.pop(name) for name in _TLS_OPTIONS if is_tls and name in options}
    credentials: FileCredentials | CredentialProvider | None = None
    if (name := options.pop("credential_provider", None)) is not None:
        credentials = load_provider(name)
    if (file := options.pop("password_file", None)) is not None:
        if credentials is not None:
            raise invalid(f"bus URL of {shown!r}: password_file and credential_provider exclude each other", "bus_url")
        credentials = FileCredentials(Path(file), username)
    return RedisAddress(
        tls=_tls_context(shown, tls_options) if is_tls else None, tls_options=tls_options, credentials=credentials
    )


def _tls_context(shown: str, options: dict[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
        if certfile := options.get("ssl_certfile"):
            context.load_cert_chain(certfile, options.get("ssl_keyfile"))
    except OSError as error:
        raise invalid(f"bus URL of {shown!r}: a certificate file cannot be read: {error}", param="bus_url") from error
    requirement = options.get("ssl_cert_reqs", "required")
    if requirement not in ("required", "none"):
        raise invalid(f"bus URL of {shown!r}: ssl_cert_reqs must be 'required' or 'none'", param="bus_url")
    if requirement == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
