"""The file of API keys: its lines, as the command prints them, and what becomes of it while a gateway runs."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import structlog
from api_keys import KEY, OTHER_KEY, WRONG_KEY, bearer, line
from memory_bus import MemoryBus
from running_gateway import RunningGateway, eventually

from contract.domain.api_keys import hash_api_key
from contract.domain.errors import ErrorCode, PenstockError
from gateway_svc.core.auth import Caller, KeyAuthenticator, KeyLimits, NoAuthentication, parse_keys
from gateway_svc.core.stats import GatewayStats
from gateway_svc.keys_file import KeysFile
from gateway_svc.service import GatewayService
from gateway_svc.settings import GatewaySettings
from penstock.cli import main

Launch = Callable[..., RunningGateway]


@pytest.fixture
def gateway(launch: Launch, keys_file: Path) -> RunningGateway:
    return launch(api_keys_file=keys_file)


@pytest.mark.parametrize("given", ["Bearer k", "bearer k", "BEARER   k "])
def test_a_key_is_found_however_the_scheme_is_written(given: str) -> None:
    assert KeyAuthenticator({hash_api_key("k"): Caller("t")}).authenticate({"authorization": given}) == Caller("t")


@pytest.mark.parametrize(
    "given", [None, "", "k", "Bearer", "Bearer ", "Basic k", "Bearer k k", "Bearer K", "Bearer ké"]
)
def test_anything_else_is_refused_without_being_quoted(given: str | None) -> None:
    door = KeyAuthenticator({hash_api_key("k"): Caller("t")})
    with pytest.raises(PenstockError) as caught:
        door.authenticate({} if given is None else {"authorization": given})
    assert caught.value.code is ErrorCode.UNAUTHENTICATED
    assert not given or given not in caught.value.message.replace("Bearer KEY", "")


def test_without_keys_everybody_is_the_default_tenant() -> None:
    assert NoAuthentication().authenticate(bearer("whatever")) == Caller("")


def test_a_bound_holds_for_what_is_below_it() -> None:
    assert [Caller("t", 5).priority(asked) for asked in (-9, 0, 5, 9)] == [5, 5, 5, 9]
    assert Caller("t").priority(-9) == -9


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("{", "line 1 is not"),
        ("\n\xff", "line 2 is not"),
        (line(KEY, "one") + line(KEY, "other"), "line 2 has the sha256 of a line before"),
        (line(KEY, "no spaces"), "line 1 is not"),
        (line(KEY, "one\n"), "line 1 is not"),
        (line(KEY, ""), "line 1 is not"),
        (line(KEY, "one", min_prioritty=3), "line 1 is not"),
        (line(KEY, "one", min_priority=2**31), "line 1 is not"),
        (line(KEY, "one", rpm=0), "line 1 is not"),
        (line(KEY, "one", tpm=1.5), "line 1 is not"),
        (line(KEY, "one", max_running="many"), "line 1 is not"),
        (json.dumps({"tenant": "one", "sha256": KEY}), "line 1 is not"),
        (json.dumps({"tenant": "one", KEY: ""}), "line 1 is not"),
        (json.dumps({"tenant": "one", "sha256": hash_api_key(KEY).hex().upper()}), "line 1 is not"),
    ],
)
def test_a_wrong_file_is_refused_by_line_and_not_quoted(wrong: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        parse_keys(wrong.encode("latin-1"))
    assert KEY not in str(caught.value)
    assert hash_api_key(KEY).hex() not in str(caught.value).lower()


def test_what_the_command_prints_lets_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "--tenant", "one", "--name", "Zoë's", "--min-priority", "-3"]) == 0
    first, entry = capsys.readouterr().out.splitlines()
    assert main(["keys", "new", "--tenant", "one"]) == 0
    second, _ = capsys.readouterr().out.splitlines()
    assert first != second
    assert len(first) == len("psk_") + 43  # 256 bits in base 64
    assert first not in entry
    assert KeyAuthenticator(parse_keys(entry.encode())).authenticate(bearer(first)) == Caller("one", -3)


def test_a_key_may_be_made_with_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "--tenant", "one", "--rpm", "60", "--tpm=9000", "--max-running", "4"]) == 0
    key, entry = capsys.readouterr().out.splitlines()
    limits = KeyAuthenticator(parse_keys(entry.encode())).authenticate(bearer(key)).limits
    digest = hash_api_key(key)
    assert limits == KeyLimits(digest[:8], f"{digest.hex()[:8]}…", 60, 9000, 4)


@pytest.mark.parametrize(
    "argv",
    [
        *([], ["new"], ["new", "--tenant", "a b"], ["new", "--tenant=a", "--min-priority=2147483648"]),
        *(["new", "--tenant=a", f"--{name}=0"] for name in ("rpm", "tpm", "max-running")),
    ],
)
def test_a_key_for_nobody_is_not_made(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["keys", *argv])
    assert end.value.code == 2
    assert capsys.readouterr().out == ""


def test_a_file_is_read_again_when_it_changed_and_only_then(keys_file: Path) -> None:
    stats = GatewayStats()
    file = KeysFile(keys_file, stats, gone_s=60)
    assert {caller.tenant for caller in file.read().values()} == {"one", "other"}
    assert file.read_if_changed(0) is None
    keys_file.write_text(line(KEY, "one"))
    assert file.read_if_changed(0) == {hash_api_key(KEY): Caller("one")}
    assert file.read_if_changed(0) is None
    new = keys_file.with_suffix(".new")
    new.write_text(line(KEY, "two"))
    new.replace(keys_file)
    assert file.read_if_changed(0) == {hash_api_key(KEY): Caller("two")}
    assert (stats.num_key_reloads, stats.num_broken_key_reloads) == (3, 0)


def test_trouble_with_the_file_is_told_once_and_ends_with_the_next_good_one(keys_file: Path) -> None:
    stats = GatewayStats()
    file = KeysFile(keys_file, stats, gone_s=60)
    file.read()
    for content, expected in ((f'{{"{KEY}"', 1), (None, 2), (f'{{"{KEY}":', 3)):
        keys_file.unlink(missing_ok=True)
        if content is not None:
            keys_file.write_text(content)
        with structlog.testing.capture_logs() as lines:
            assert file.read_if_changed(0) is None
            assert file.read_if_changed(1) is None
        ((level, why),) = [(entry["log_level"], entry["why"]) for entry in lines]
        assert level == "error"
        assert ("no such file" if content is None else "line 1") in why
        assert stats.num_broken_key_reloads == expected
    keys_file.write_text(line(KEY, "one"))
    assert file.read_if_changed(0) == {hash_api_key(KEY): Caller("one")}


def test_a_broken_file_is_told_again_each_minute(keys_file: Path) -> None:
    stats = GatewayStats()
    file = KeysFile(keys_file, stats, gone_s=60)
    file.read()
    keys_file.write_text("{")
    with structlog.testing.capture_logs() as lines:
        assert [file.read_if_changed(now_s) for now_s in (0, 30, 59, 60, 61, 119, 120)] == [None] * 7
    assert [entry["event"] for entry in lines] == ["the API keys from before stay valid"] * 3
    assert stats.num_broken_key_reloads == 1


@pytest.mark.parametrize("content", ["", "# nobody\n\n"])
def test_a_file_that_stays_empty_means_nobody(keys_file: Path, content: str) -> None:
    file = KeysFile(keys_file, GatewayStats(), gone_s=60)
    file.read()
    keys_file.write_text(content)
    with structlog.testing.capture_logs() as lines:
        assert file.read_if_changed(0) is None, "it may be half written"
        assert file.read_if_changed(1) == {}
        assert file.read_if_changed(2) is None
    assert [entry["event"] for entry in lines] == ["the API keys file has no key any more: nobody may call"]
    keys_file.write_text(line(KEY, "one"))
    assert file.read_if_changed(3) == {hash_api_key(KEY): Caller("one")}
    keys_file.write_text("")
    assert file.read_if_changed(4) is None
    keys_file.write_text(line(OTHER_KEY, "two"))
    assert file.read_if_changed(5) == {hash_api_key(OTHER_KEY): Caller("two")}, "it was"


def test_the_keys_of_a_file_that_is_gone_stay_valid_for_a_while(keys_file: Path) -> None:
    stats = GatewayStats()
    file = KeysFile(keys_file, stats, gone_s=60)
    file.read()
    kept = keys_file.rename(keys_file.with_suffix(".kept"))
    with structlog.testing.capture_logs() as lines:
        assert [file.read_if_changed(now_s) for now_s in (100, 130, 159)] == [None] * 3
        assert file.read_if_changed(160) == {}
        assert file.read_if_changed(161) is None
    assert [entry["event"] for entry in lines] == [
        "the API keys stay valid for 60 s at most",
        "the API keys file is gone: nobody may call",
    ]
    kept.rename(keys_file)
    again = file.read_if_changed(162)
    assert again is not None
    assert len(again) == 2
    keys_file.rename(kept)
    assert file.read_if_changed(200) is None
    kept.rename(keys_file)
    assert file.read_if_changed(230) is not None
    keys_file.rename(kept)
    assert file.read_if_changed(261) is None, "each time has the whole patience"


def test_a_running_gateway_lets_nobody_in_when_its_file_was_emptied(gateway: RunningGateway, keys_file: Path) -> None:
    with httpx.Client(base_url=gateway.url, timeout=300) as http:
        assert http.get("/v1/models", headers=bearer(KEY)).status_code == 200
        keys_file.write_text("")
        eventually(lambda: http.get("/v1/models", headers=bearer(KEY)).status_code == 401)


def test_a_gateway_starts_with_a_file_that_means_nobody(launch: Launch, keys_file: Path) -> None:
    keys_file.write_text("")
    gateway = launch(api_keys_file=keys_file)
    assert httpx.get(f"{gateway.url}/v1/models", headers=bearer(KEY), timeout=300).status_code == 401


@pytest.mark.parametrize("content", [None, "nonsense"])
def test_a_gateway_does_not_start_without_usable_keys(keys_file: Path, content: str | None) -> None:
    keys_file.unlink()
    if content is not None:
        keys_file.write_text(content)
    with pytest.raises(PenstockError, match=r"API keys file .* cannot be used") as caught:
        GatewayService(GatewaySettings(api_keys_file=keys_file), MemoryBus())
    assert caught.value.code is ErrorCode.INTERNAL


def replace(file: Path, content: str) -> None:
    """In one step, so that nobody reads a part of it."""
    new = file.with_name("new")
    new.write_text(content)
    new.rename(file)


def test_a_running_gateway_takes_new_keys_and_survives_a_broken_file(gateway: RunningGateway, keys_file: Path) -> None:
    with httpx.Client(base_url=gateway.url, timeout=300) as http:

        def status(key: str) -> int:
            return http.get("/v1/models", headers=bearer(key)).status_code

        assert (status(KEY), status(WRONG_KEY)) == (200, 401)
        replace(keys_file, "half a li")
        eventually(lambda: 'penstock_api_key_reloads_total{result="failure"} 1.0' in http.get("/metrics").text)
        assert (status(KEY), status(WRONG_KEY)) == (200, 401)
        replace(keys_file, line(WRONG_KEY, "new"))
        eventually(lambda: status(WRONG_KEY) == 200)
        assert status(KEY) == 401
        assert 'penstock_api_key_reloads_total{result="success"} 2.0' in http.get("/metrics").text
