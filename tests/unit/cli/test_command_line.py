import io
from collections.abc import Generator
from pathlib import Path

import pytest

from contract.domain.api_keys import API_KEY_VARIABLE
from contract.domain.errors import ErrorCode, PenstockError
from penstock import __version__
from penstock.cli import bench, main
from penstock.client import Client
from penstock.client.events import Event


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for name in (
        *("serve", "gateway", "tokenizer", "scheduler", "worker", "detokenizer"),
        *("chat", "complete", "status", "trace", "run-batch", "keys", "tune", "bench", "collect-env"),
    ):
        assert f"\n  {name} " in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"penstock {__version__}\n"


@pytest.mark.parametrize(
    "argv", [[], ["frob"], ["status", "--frob"], ["gateway", "--frob"], ["chat", "--max-tokens=x"]]
)
def test_what_is_unknown_is_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2


@pytest.mark.parametrize("service", ["gateway", "tokenizer", "scheduler", "worker", "detokenizer"])
def test_every_service_can_be_run_by_its_name(service: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([service, "--help"])
    assert end.value.code == 0
    assert f"usage: {service}_svc" in capsys.readouterr().out


def test_bench_lists_and_runs_what_the_repository_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "speed.py").write_text(
        '"""How fast.\n\nMore."""\nimport sys\nif __name__ == "__main__":\n    print(sys.argv[1:])\n    sys.exit(3)\n'
    )
    (tmp_path / "shared.py").write_text('"""Not a benchmark."""\n')
    monkeypatch.setattr(bench, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["bench"]) == 0
    shown = capsys.readouterr().out
    assert "speed            How fast.\n" in shown
    assert "shared" not in shown
    assert main(["bench", "speed", "--steps", "5"]) == 3
    assert capsys.readouterr().out == "['--steps', '5']\n"
    assert main(["bench", "slow"]) == 2
    assert "there is no 'slow'; there are serve, throughput, latency, speed" in capsys.readouterr().err


def test_chat_says_so_when_no_model_is_served_yet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Client, "models", lambda self: [])
    assert main(["chat", "--address", "127.0.0.1:1"]) == 1
    assert "no worker has registered a model yet" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["complete", "x"], ["chat"], ["status"]])
def test_commands_that_call_take_a_key_from_the_flag_or_else_from_the_environment(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[object] = []

    def connect(_self: Client, _address: str, *, api_key: str | None, **_: object) -> None:
        given.append(api_key)
        raise PenstockError(ErrorCode.UNAVAILABLE, "not today")

    monkeypatch.setattr(Client, "__init__", connect)
    for variable in (None, "", "psk_variable"):
        monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
        if variable is not None:
            monkeypatch.setenv(API_KEY_VARIABLE, variable)
        assert main(argv) == 1
    assert main([*argv, "--api-key", "psk_flag"]) == 1
    assert given == [None, None, "psk_variable", "psk_flag"]
    with pytest.raises(SystemExit):
        main([argv[0], "--help"])
    assert "psk_variable" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "prompt"), [("a b\n", "a b"), ("a\n\n", "a\n"), ("a", "a"), ("\n", ""), (" a \n", " a ")]
)
def test_the_line_break_at_the_end_of_standard_input_is_no_part_of_a_prompt(
    given: str, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def generate(_self: Client, text: str, *_: object, **__: object) -> Generator[Event, None, None]:
        asked.append(text)
        yield from ()

    monkeypatch.setattr(Client, "generate", generate)
    monkeypatch.setattr("sys.stdin", io.StringIO(given))
    assert main(["complete", "--address", "127.0.0.1:1"]) == 0
    assert main(["complete", "--address", "127.0.0.1:1", "said\n"]) == 0
    assert asked == [prompt, "said\n"]


@pytest.mark.parametrize("given", ["-1", "0", "0.05", "nan", "inf", "x", "1e9"])
def test_an_interval_that_cannot_be_waited_for_is_told_in_a_sentence(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["status", f"--interval-s={given}"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "argument --interval-s" in said
    assert "Traceback" not in said


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", f"--control-token-file={tmp_path}/none"]) == 1
    assert f"{tmp_path}/none cannot be read" in capsys.readouterr().err


def test_what_this_machine_has_is_told_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "sk-secret")
    assert main(["collect-env"]) == 0
    shown = capsys.readouterr().out
    for name in ("penstock", "python", "system", "processor", "memory", "server", "gpu", "torch"):
        assert f"\n{name} " in f"\n{shown}"
    assert "package       hiredis " in shown
    assert f"{API_KEY_VARIABLE} is set" in shown
    assert "secret" not in shown
