"""Bus URLs: what they mean, and what is refused."""

from pathlib import Path
from urllib.parse import quote

import pytest
import redis

from contract.domain.errors import Fault, PenstockError
from servicekit.bus import BusUnavailable, RedisBus, open_bus
from servicekit.bus.redis_address import RedisAddress, parse_address
from servicekit.bus.redis_finder import AddressFinder, Sentinels, read_directory


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://", RedisAddress("localhost")),
        ("redis://cache.example:7000", RedisAddress("cache.example", 7000)),
        ("valkey://cache.example/2", RedisAddress("cache.example", database=2)),
        ("redis://cache.example?db=3", RedisAddress("cache.example", database=3)),
        ("redis://:p%40ss@cache.example", RedisAddress("cache.example", password="p@ss")),
        ("redis://me:p%2Fss@[::1]:7000/1", RedisAddress("::1", 7000, username="me", password="p/ss", database=1)),
        ("unix:///run/penstock%20a.sock?db=4", RedisAddress(path="/run/penstock a.sock", database=4)),
        ("unix://:pass@/run/a.sock", RedisAddress(path="/run/a.sock", password="pass")),
    ],
)
def test_a_url_names_a_server(url: str, address: RedisAddress) -> None:
    assert parse_address(url) == address


def test_rediss_checks_certificates_unless_told_otherwise() -> None:
    strict, lax = parse_address("rediss://cache.example").tls, parse_address("rediss://h?ssl_cert_reqs=none").tls
    assert strict is not None
    assert lax is not None
    assert (strict.check_hostname, lax.check_hostname) == (True, False)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://secret@cache.example", "scheme 'http'"),
        ("cache.example:6379", "scheme"),
        ("redis://:secret@cache.example:port", "port"),
        ("redis://:secret@cache.example/zero", "zero"),
        ("redis://:secret@cache.example?timeout=3", "unknown parameter 'timeout'"),
        ("redis://:secret@cache.example?ssl_ca_certs=/a.pem", "unknown parameter 'ssl_ca_certs'"),
        ("rediss://:secret@cache.example?ssl_cert_reqs=perhaps", "'required' or 'none'"),
        ("rediss://:secret@cache.example?ssl_ca_certs=/does/not/exist.pem", "cannot be read"),
        ("unix://", "path"),
        ("sentinel://me:secret@h1,h2", "sentinel://HOST"),
        ("sentinel://me:secret@h1,,h2/pool", "sentinel://HOST"),
        ("sentinel://me:secret@h1:port/pool", "port"),
        ("sentinel://me:secret@h1/pool?timeout=3", "unknown parameter 'timeout'"),
        ("redis://:secret@h?credential_provider=no.such.module:name", "no.such.module"),
        ("redis://:secret@h?credential_provider=os", "MODULE:NAME"),
        ("redis://:secret@h?credential_provider=builtins:dict", "no redis.CredentialProvider"),
        ("redis://:secret@h?password_file=/a&credential_provider=redis:UsernamePasswordCredentialProvider", "exclude"),
    ],
)
def test_a_malformed_url_is_refused_without_showing_its_password(url: str, reason: str) -> None:
    with pytest.raises(PenstockError, match=reason) as refused:
        open_bus(url)
    assert refused.value.param == "bus_url"
    assert refused.value.fault is Fault.CALLER
    assert "secret" not in str(refused.value)


def test_a_bus_connects_only_when_asked_to() -> None:
    assert isinstance(open_bus("redis://does-not-exist.invalid"), RedisBus)


def test_a_sentinel_url_names_sentinels_and_a_primary() -> None:
    url = "sentinel://me:p%40ss@h1,h2:7000,[::1]:7001/pool?db=3&sentinel_username=s&sentinel_password=q"
    directory = read_directory(url)
    assert directory.sentinels == Sentinels((("h1", 26379), ("h2", 7000), ("::1", 7001)), "pool", "s", "q")
    assert directory.server == RedisAddress("", username="me", password="p@ss", database=3)
    assert read_directory("sentinels://h1/pool").server.tls is not None
    assert isinstance(open_bus(url), RedisBus)


def test_a_password_in_a_file_is_read_before_each_connection(tmp_path: Path) -> None:
    secret = tmp_path / "secret file"
    secret.write_text("first\n")
    address = parse_address(f"redis://me@h?password_file={quote(str(secret))}")
    assert address.login() == [(b"AUTH", "me", "first")]
    secret.write_text("second\n")
    assert address.login() == [(b"AUTH", "me", "second")]
    secret.unlink()
    with pytest.raises(BusUnavailable, match="credentials"):
        address.login()


def test_credentials_may_come_from_a_provider_of_redis_py() -> None:
    address = parse_address("redis://h?credential_provider=redis:UsernamePasswordCredentialProvider")
    assert isinstance(address.credentials, redis.UsernamePasswordCredentialProvider)
    assert address.login() == [(b"AUTH", "")]


def test_a_node_that_cannot_be_reached_gives_way_to_others_of_its_cluster() -> None:
    finder = AddressFinder(RedisAddress("seed"))
    finder.give_up()
    assert finder.find().host == "seed", "there is no other"
    finder._candidates.append(RedisAddress("other"))
    finder.give_up()
    assert finder.find().host == "other"
    finder.give_up()
    assert finder.find().host == "seed"
