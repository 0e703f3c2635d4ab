"""A file of flags is one more layer of settings: flags count for more, the environment for less."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from servicekit.settings import ServiceSettings, load


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ServiceSettings):
    max_streams: int = field(default=7, metadata={"help": "streams"})
    names: tuple[str, ...] = field(default=(), metadata={"help": "names"})
    is_strict: bool = field(default=False, metadata={"help": "strictness"})


def settings(tmp_path: Path, text: str, *flags: str, **environ: str) -> Settings:
    path = tmp_path / "settings.yaml"
    path.write_text(text, "utf-8")
    return load(Settings, [*flags, f"--config={path}"], environ)


def test_each_line_is_a_flag_with_dashes_or_underscores(tmp_path: Path) -> None:
    text = "max-streams: 3\nnum_shards: 8\nnames: [a, b]\nis-strict: true\nredis-password-file: null\npool: '12'\n"
    found = settings(tmp_path, text)
    assert (found.max_streams, found.num_shards, found.names) == (3, 8, ("a", "b"))
    assert (found.is_strict, found.redis_password_file, found.pool) == (True, None, "12")


def test_flags_count_for_more_than_the_file_and_the_environment_for_less(tmp_path: Path) -> None:
    text = "max-streams: 3\nis-strict: true\n"
    found = settings(
        tmp_path, text, "--no-is-strict", PENSTOCK_MAX_STREAMS="9", PENSTOCK_NUM_SHARDS="2", PENSTOCK_IS_STRICT="true"
    )
    assert (found.max_streams, found.is_strict, found.num_shards) == (3, False, 2)


def test_a_file_that_says_nothing_is_none(tmp_path: Path) -> None:
    assert settings(tmp_path, "# nothing\n").max_streams == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-stream: 3\n", "there is no flag --max-stream: did you mean max-streams?"),
        ("config: other.yaml\n", "there is no flag --config"),
        ("max-streams: 3\nmax_streams: 4\n", "max-streams stands there twice"),
        ("max-streams: {a: 1}\n", "max-streams must be a text, a number or a list of them, got {'a': 1}"),
        ("max-streams: true\n", "max-streams must be a text"),
        ("is-strict: 1\n", "is-strict is true or false, got 1"),
        ("- max-streams\n", "it must have a flag and its value a line"),
        ("max-streams: [3\n", "it is not YAML: "),
        ("max-streams: many\n", "--max-streams='many'"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    with pytest.raises(SystemExit) as end:
        settings(tmp_path, text)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_not_there_is_told_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(Settings, ["--config", str(tmp_path / "none.yaml")], {})
    assert f"--config {tmp_path / 'none.yaml'}: it cannot be read" in capsys.readouterr().err
