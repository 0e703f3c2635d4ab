"""`penstock chat` and `complete` with --base-url, against a server that is not Penstock's."""

import io
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import trustme
from openai_like import DONE, Answer, OpenAILike, event
from rich.console import Console

from contract.domain.api_keys import API_KEY_VARIABLE
from penstock.cli import chat, main
from penstock.cli.answers import Piece
from penstock.cli.answers.flags import OPENAI_KEY_VARIABLE

Serve = Callable[..., OpenAILike]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda *answers, **more: stack.enter_context(OpenAILike(list(answers), **more).serve())


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    monkeypatch.delenv(OPENAI_KEY_VARIABLE, raising=False)


def texts(*words: str) -> list[bytes]:
    return [event(choices=[{"index": 0, "text": word}]) for word in words]


def deltas(*found: dict[str, Any]) -> list[bytes]:
    return [event(choices=[{"index": 0, "delta": delta}]) for delta in found]


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


USAGE = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7})
SAID = Answer(
    [*deltas({"role": "assistant", "content": ""}, {"content": "[b]hi"}, {"content": " :smile:"}), USAGE, DONE]
)
WORDS = Answer([*texts("one", " two"), DONE])


def test_complete_streams_the_text_and_nothing_else(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(WORDS)
    assert main(["complete", "--base-url", server.url, "zero"]) == 0
    assert capsys.readouterr() == ("one two\n", "")
    assert server.paths() == ["/v1/models", "/v1/completions"]
    [body] = server.bodies()
    assert body == {
        "model": "first",
        "prompt": "zero",
        "max_tokens": 128,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert server.keys() == [None, None]


def test_sampling_flags_go_by_openais_names(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(WORDS, SAID)
    flags = ["--temperature=0", "--top-p=0.5", "--top-k=3", "--seed=7", "--stop=x", "--stop=y", "--max-tokens=9"]
    assert main(["complete", "--base-url", server.url, *flags, "zero"]) == 0
    typed(monkeypatch, "hello")
    assert main(["chat", "--base-url", server.url, *flags]) == 0
    completion, talk = server.bodies()
    sampling = {"temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 7, "stop": ["x", "y"]}
    for body, bound in ((completion, "max_tokens"), (talk, "max_completion_tokens")):
        assert {name: body[name] for name in sampling} == sampling
        assert [(name, body[name]) for name in ("max_tokens", "max_completion_tokens") if name in body] == [(bound, 9)]


def test_a_chat_remembers_what_was_said_and_begins_anew(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(SAID, SAID, SAID)
    typed(monkeypatch, "one", "two", "/new", "three")
    assert main(["chat", "--base-url", server.url, "--system", "be brief", "--model", "other/one"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("other/one ")
    assert shown.count("[b]hi :smile:\n") == 3
    assert shown.count("4 tokens, first after") == 3
    assert server.paths() == ["/v1/chat/completions"] * 3
    assert {body["model"] for body in server.bodies()} == {"other/one"}
    told = [[(each["role"], each["content"]) for each in body["messages"]] for body in server.bodies()]
    system, one = ("system", "be brief"), ("user", "one")
    assert told == [
        [system, one],
        [system, one, ("assistant", "[b]hi :smile:"), ("user", "two")],
        [system, ("user", "three")],
    ]


def test_thoughts_are_shown_apart_and_not_sent_back(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = deltas(
        {"reasoning_content": "let me"}, {"reasoning_content": " see"}, {"content": "four"}, {"content": "!"}
    )
    server = serve(Answer([*found, DONE]), SAID)
    typed(monkeypatch, "2+2", "sure?")
    assert main(["chat", "--base-url", server.url]) == 0
    shown = capsys.readouterr().out
    assert "let me see\n\nfour!\n" in shown
    assert "     first after" in shown  # that server tells no usage
    assert server.bodies()[1]["messages"][1] == {"role": "assistant", "content": "four!"}


@pytest.mark.parametrize(
    ("base", "path"), [("", "/v1/"), ("/", "/v1/"), ("/v1", "/v1/"), ("/v1/", "/v1/"), ("/openai/v2", "/openai/v2/")]
)
def test_a_url_is_that_of_an_api_or_of_its_host_alone(serve: Serve, base: str, path: str) -> None:
    server = serve(WORDS)
    assert main(["complete", "--base-url", server.url + base, "zero"]) == 0
    assert server.paths() == [f"{path}models", f"{path}completions"]


def test_the_key_is_the_flags_or_openais_variable_and_never_penstocks(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(WORDS, WORDS, WORDS)
    call = ["complete", "--model=m", "--base-url", server.url, "zero"]
    monkeypatch.setenv(API_KEY_VARIABLE, "psk_own")
    assert main(call) == 0
    monkeypatch.setenv(OPENAI_KEY_VARIABLE, "sk-variable")
    assert main(call) == 0
    assert main([*call, "--api-key", "sk-flag"]) == 0
    assert server.keys() == [None, "Bearer sk-variable", "Bearer sk-flag"]


def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in ("sk-gehëim", "sk-secret\n"):
        assert main(["complete", "--base-url", serve().url, "--api-key", key, "zero"]) == 1
        said = capsys.readouterr().err
        assert "no header can carry" in said
        assert key[:6] not in said


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            Answer([b'{"error": {"message": "temperature is too\\nhigh", "code": null}}'], 400, "application/json"),
            "the server answered 400: temperature is too high",
        ),
        (Answer([b'{"detail": "Unauthorized"}'], 401, "application/json"), "--api-key or OPENAI_API_KEY"),
        (Answer([b"<html>\n bad gateway"], 502, "text/html"), "the server answered 502: <html> bad gateway"),
        (Answer([b""], 500), "the server answered 500\n"),
        (Answer(texts("one")), "ended without [DONE]"),
        (Answer(texts("one"), length=1000), "the connection to the server broke: peer closed connection"),
        (Answer([*texts("one"), b'data: {"choices": [{"te']), "ended without [DONE]"),
        (Answer([b'{"choices": [{"text": "not streamed"}]}'], type="application/json"), "ended without [DONE]"),
        (
            Answer([*texts("one"), event(error={"message": "the engine died", "code": 500}), DONE]),
            "the server ended its answer with an error: the engine died",
        ),
        (Answer([b"data: {\n\n", DONE]), "an event of the server is not as OpenAI's"),
    ],
)
def test_an_error_of_the_server_is_a_sentence_and_status_1(
    serve: Serve,
    answer: Answer,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = serve(answer, answer)
    typed(monkeypatch, "hello")
    for command in (["complete", "zero"], ["chat"]):
        assert main([*command, "--base-url", server.url]) == 1
        shown = capsys.readouterr().err
        assert said in shown
        assert shown.count("\n") == 1


def test_an_end_mark_without_its_blank_line_is_an_end(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "--base-url", serve(Answer([*texts("one"), b"data: [DONE]"])).url, "zero"]) == 0
    assert capsys.readouterr() == ("one\n", "")


@pytest.mark.parametrize(
    ("models", "status", "said"),
    [
        ({"object": "list", "data": []}, 200, "lists no model: name one with --model"),
        (["a"], 200, "lists no model"),
        ({"error": {"message": "no such route"}}, 404, "the server answered 404: no such route"),
    ],
)
def test_a_server_that_lists_no_model_is_told_so(
    serve: Serve, models: Any, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(models=models, models_status=status)
    assert main(["chat", "--base-url", server.url]) == 1
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1
    assert server.bodies() == []


def test_a_server_that_is_not_there_or_is_silent_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert main(["complete", "--base-url", url, "--model=m", "--timeout-s=0.2", "zero"]) == 1
        assert "no whole answer within --timeout-s 0.2" in capsys.readouterr().err
    assert main(["complete", "--base-url=http://127.0.0.1:1", "--model=m", "zero"]) == 1
    assert "the server at http://127.0.0.1:1/v1/ cannot be reached" in capsys.readouterr().err


def test_an_answer_that_lasts_too_long_is_given_up(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(Answer(repeat(event(choices=[{"index": 0, "text": "on"}]))))
    assert main(["complete", "--base-url", server.url, "--model=m", "--timeout-s=0.5", "zero"]) == 1
    assert "no whole answer within --timeout-s 0.5" in capsys.readouterr().err
    assert server.left.wait(300)


def test_ctrl_c_stops_an_answer_and_what_was_said_counts(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Piece] = []

    def show(_console: Console, piece: Piece, **_: object) -> None:
        if len(seen) == 2:
            seen.clear()
            raise KeyboardInterrupt
        seen.append(piece)

    monkeypatch.setattr(chat, "_show", show)
    server = serve(Answer(repeat(event(choices=[{"index": 0, "delta": {"content": "on"}}]))), SAID)
    typed(monkeypatch, "count", "go on")
    assert main(["chat", "--base-url", server.url]) == 0
    assert "…" in capsys.readouterr().out
    assert server.left.wait(300)
    assert server.bodies()[1]["messages"][1] == {"role": "assistant", "content": "onon"}


def test_https_trusts_the_named_authority_and_shows_the_named_certificate(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.cli.answers._CONNECT_TIMEOUT_S", 300.0)  # the greeting of TLS belongs to it
    ours, clients = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.issue_cert("127.0.0.1").configure_cert(context)
    clients.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    files = {name: tmp_path / name for name in ("ca", "cert", "key")}
    signed = clients.issue_cert("client.example.org")
    ours.cert_pem.write_to_path(files["ca"])
    signed.cert_chain_pems[0].write_to_path(files["cert"])
    signed.private_key_pem.write_to_path(files["key"])
    call = ["complete", "--model=m", "--base-url", serve(WORDS, tls=context).url, "zero"]
    flags = [f"--tls-{name}={path}" for name, path in files.items()]
    assert main([*call, *flags]) == 0
    assert capsys.readouterr().out == "one two\n"
    assert main(call) == 1
    assert "certificate verify failed" in capsys.readouterr().err
    assert main([*call, f"--tls-ca={tmp_path}/none"]) == 1
    assert "--tls-ca, --tls-cert and --tls-key cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--base-url=http://h", "--address=127.0.0.1:50051"], "--address is for gRPC"),
        (["--base-url=http://h", "--tls"], "--tls is for gRPC"),
        (["--base-url=https://h", "--tls-key=k"], "--tls-key without --tls-cert"),
        (["--base-url=localhost:8000"], "argument --base-url: 'localhost:8000' is no URL"),
        (["--base-url="], "argument --base-url: '' is no URL"),
        (["--base-url=http://h:port"], "argument --base-url: 'http://h:port': Invalid port"),
        (["--base-url=http://h/v1?key=1"], "argument --base-url: 'http://h/v1?key=1' is no URL"),
    ],
)
@pytest.mark.parametrize("command", [["complete", "zero"], ["chat"]])
def test_what_has_no_meaning_over_http_is_refused_by_name(
    command: Sequence[str], flags: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, *flags])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_parameter_out_of_bounds_is_refused_before_anything_is_sent(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve()
    assert main(["complete", "--base-url", server.url, "--temperature=-1", "zero"]) == 1
    assert "temperature" in capsys.readouterr().err
    assert server.asked == []
