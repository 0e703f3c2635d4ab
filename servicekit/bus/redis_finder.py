"""The server to connect to: asked before each connection, for the answer changes when a primary fails or moves.

The cold path, and the only place where redis-py works: it asks sentinels and clusters. It is imported when it is
needed, as it takes a fifth of a second and most pools have one server at one address (docs/adr/0001).
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from contract.domain.errors import invalid
from servicekit.bus.interface import BusUnavailable
from servicekit.bus.redis_address import CONNECT_TIMEOUT_S, RedisAddress, parse_address, shown_url, take_common

SENTINEL_PORT = 26379
SCHEMES = ("redis", "rediss", "valkey", "unix", "sentinel", "sentinels")


class AddressFinder:
    """One address; if it is a cluster's, the node there that holds the pool. For one connection."""

    asks = False  # whether `find` asks other servers, and so takes its time

    def __init__(self, address: RedisAddress) -> None:
        self._candidates = deque([address])

    def find(self) -> RedisAddress:
        """The address to connect to now."""
        return self._candidates[0]

    def give_up(self) -> None:
        """Forget a server that cannot be reached: another node of the cluster knows who holds the pool, too."""
        self._candidates.rotate(-1)

    def find_moved(self, key: bytes) -> RedisAddress:
        """The node that holds a key, after one that was found said that it does not.

        Raises:
            BusUnavailable: the cluster does not say.
        """
        from redis.cluster import RedisCluster  # noqa: PLC0415  (see above)
        from redis.exceptions import RedisError  # noqa: PLC0415

        asked = self._candidates[0]
        try:
            cluster = RedisCluster(
                host=asked.host, port=asked.port, require_full_coverage=False, **_redis_py_options(asked)
            )
            try:
                node = cluster.get_node_from_key(key.decode())  # type: ignore[no-untyped-call]
                nodes = [(each.host, each.port) for each in cluster.get_nodes()]  # type: ignore[no-untyped-call]
            finally:
                cluster.close()
        except (RedisError, OSError) as error:
            raise BusUnavailable(f"the cluster of {asked} does not say who holds the pool: {error}") from error
        if node is None:
            raise BusUnavailable(f"nobody in the cluster of {asked} holds the slot of the pool")
        first = self._candidates[0]
        others = [replace(asked, host=host, port=port) for host, port in nodes]
        self._candidates = deque([first, *(each for each in others if str(each) != str(first))])
        return replace(asked, host=node.host, port=node.port)


@dataclass(frozen=True, slots=True)
class Sentinels:
    """Those who know which server of a name is the primary."""

    hosts: tuple[tuple[str, int], ...]
    service: str
    username: str = ""
    password: str = ""


class SentinelFinder(AddressFinder):
    """The primary of a name, as sentinels know it. For one connection."""

    asks = True

    def __init__(self, sentinels: Sentinels, server: RedisAddress) -> None:
        """`server` is how to log in there; its host and port are the sentinels' to say."""
        super().__init__(server)
        self._sentinels = sentinels
        self._server = server

    def find(self) -> RedisAddress:
        """The primary of now.

        Raises:
            BusUnavailable: no sentinel answers, or none knows a primary that is up.
        """
        from redis.exceptions import RedisError  # noqa: PLC0415  (see above)
        from redis.sentinel import Sentinel  # noqa: PLC0415

        asked = self._sentinels
        login = replace(self._server, username=asked.username, password=asked.password, credentials=None)
        sentinel = Sentinel(list(asked.hosts), sentinel_kwargs=_redis_py_options(login))  # type: ignore[no-untyped-call]
        try:
            host, port = sentinel.discover_master(asked.service)  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            hosts = ", ".join(f"{host}:{port}" for host, port in asked.hosts)
            raise BusUnavailable(f"the sentinels at {hosts} know no primary {asked.service!r}: {error}") from error
        finally:
            for each in sentinel.sentinels:
                each.close()
        return replace(self._server, host=str(host), port=int(port))


@dataclass(frozen=True, slots=True)
class Directory:
    """The finder of a bus URL; each connection has one of its own."""

    server: RedisAddress
    sentinels: Sentinels | None = None

    def finder(self) -> AddressFinder:
        """For a new connection."""
        return AddressFinder(self.server) if self.sentinels is None else SentinelFinder(self.sentinels, self.server)


def read_directory(url: str) -> Directory:
    """Read the address of the server from a bus URL, or who knows it.

    As `parse_address`, and `sentinel://[[user]:password@]host[:port][,host[:port]…]/NAME`, over TLS `sentinels://`: the
    primary that sentinels know by that name. User and password are the server's; `sentinel_username` and
    `sentinel_password` are the sentinels', `db` is the database.

    Raises:
        PenstockError: the URL cannot be understood, or a certificate file cannot be read.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("sentinel", "sentinels"):
        return Directory(parse_address(url))
    shown = shown_url(url)
    login, at, hosts = parts.netloc.rpartition("@")
    username, _, password = (unquote(part) for part in login.partition(":")) if at else ("", "", "")
    try:
        options = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
        found = tuple((each.hostname or "", each.port or SENTINEL_PORT) for each in map(_host, hosts.split(",")))
        database = int(options.pop("db", "0"))
    except ValueError as error:
        raise invalid(f"bus URL of {shown!r}: {error}", param="bus_url") from error
    service = unquote(parts.path).strip("/")
    if not service or not all(host for host, _ in found):
        raise invalid(f"bus URL of {shown!r}: it must be sentinel://HOST[,HOST…]/NAME", param="bus_url")
    sentinels = Sentinels(found, service, options.pop("sentinel_username", ""), options.pop("sentinel_password", ""))
    common = take_common(shown, options, username, is_tls=parts.scheme == "sentinels")
    if options:
        raise invalid(f"bus URL of {shown!r}: unknown parameter {sorted(options)[0]!r}", param="bus_url")
    return Directory(replace(common, username=username, password=password, database=database), sentinels)


def _host(text: str) -> Any:
    return urlsplit(f"//{text}")


def _redis_py_options(address: RedisAddress) -> dict[str, Any]:
    """The arguments by which redis-py logs in as `address` does."""
    options: dict[str, Any] = {"socket_timeout": CONNECT_TIMEOUT_S, "socket_connect_timeout": CONNECT_TIMEOUT_S}
    if address.credentials is not None:
        options["credential_provider"] = address.credentials
    elif address.password:
        options |= {"username": address.username or None, "password": address.password}
    if address.tls is not None:
        is_lax = address.tls_options.get("ssl_cert_reqs") == "none"
        options |= {"ssl": True, **address.tls_options, "ssl_check_hostname": not is_lax}
    return options
