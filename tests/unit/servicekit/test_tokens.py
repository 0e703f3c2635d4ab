"""Tokens of operators: who has one is let in, and nobody else, whatever becomes of the file."""

import urllib.error
import urllib.request
from pathlib import Path

import pytest
import structlog

from contract.domain.errors import ErrorCode, PenstockError
from servicekit.metrics import MetricsEndpoint, make_registry
from servicekit.tokens import TokenFile, open_token, write_token

TOKEN, OTHER = "t0ken-" * 4, "other-" * 4


class Vitals:
    is_ready = is_alive = True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    write_token(path, TOKEN)
    return path


def test_a_token_is_the_files_line(path: Path) -> None:
    token = TokenFile(path, "--flag")
    assert token.admits(TOKEN)
    assert not any(map(token.admits, (None, "", TOKEN[:-1], TOKEN + "x", TOKEN + "\n", "é" * 20)))
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_token(path, OTHER)


def test_another_token_counts_as_soon_as_it_is_there(path: Path) -> None:
    token = TokenFile(path, "--flag")
    new = path.with_suffix(".new")
    write_token(new, OTHER)
    new.replace(path)
    assert (token.admits(TOKEN), token.admits(OTHER)) == (False, True)


@pytest.mark.parametrize("content", [None, "", "short", "two\nlines of some length", "ünseen" * 5])
def test_without_a_usable_file_nobody_is_let_in_and_nothing_starts(path: Path, content: str | None) -> None:
    token = TokenFile(path, "--flag")
    path.unlink()
    if content is not None:
        path.write_text(content)
    with structlog.testing.capture_logs() as lines:
        assert not token.admits(TOKEN)
        assert not token.admits(content)
        assert not token.admits("")
    assert len(lines) == 1
    with pytest.raises(PenstockError, match=r"--flag .* cannot be used") as caught:
        TokenFile(path, "--flag")
    assert caught.value.code is ErrorCode.INTERNAL
    assert not content or content not in caught.value.message
    path.unlink(missing_ok=True)
    write_token(path, TOKEN)
    assert token.admits(TOKEN)


def test_without_a_setting_nothing_is_asked_for() -> None:
    assert open_token(None, "--flag") is None


def test_the_metrics_ask_for_their_token_and_health_does_not(path: Path) -> None:
    endpoint = MetricsEndpoint("127.0.0.1:0", make_registry([]), Vitals(), TokenFile(path, "--flag"))

    def status(where: str, **headers: str) -> int:
        asked = urllib.request.Request(f"http://127.0.0.1:{endpoint.port}{where}", headers=headers)
        try:
            with urllib.request.urlopen(asked, timeout=300) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code

    try:
        assert [status("/health"), status("/ready"), status("/metrics")] == [200, 200, 401]
        assert status("/metrics", Authorization=f"Bearer {TOKEN}") == 200
        assert status("/metrics", Authorization=f"Bearer {OTHER}") == status("/metrics", Authorization=TOKEN) == 401
        assert status("/") == 401
    finally:
        endpoint.close()
