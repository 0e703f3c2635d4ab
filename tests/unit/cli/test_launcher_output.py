import io

import pytest

from penstock.launcher.output import Output


def test_lines_of_children_have_their_name_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    stream = io.StringIO()
    output = Output(stream=stream)
    output.introduce("gateway-0")
    output.introduce("detokenizer-0")
    output.relay("gateway-0", "hello")
    output.say("stopped")
    assert stream.getvalue() == "    gateway-0 | hello\nstopped\n"


def test_colors_tell_children_apart_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = io.StringIO()
    output = Output(stream=stream)
    for name in ("a", "b"):
        output.introduce(name)
        output.relay(name, "x")
    first, second = stream.getvalue().splitlines()
    assert first.replace("a", "") != second.replace("b", "")
    assert first.endswith("\x1b[0m x")


def test_json_lines_go_through_as_they_are() -> None:
    stream = io.StringIO()
    output = Output(prefixed=False, stream=stream)
    output.introduce("gateway-0")
    output.relay("gateway-0", '{"event":"x"}')
    assert stream.getvalue() == '{"event":"x"}\n'


def test_a_reader_that_left_does_not_stop_the_pipeline() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    output = Output(stream=Broken())
    output.say("nobody hears this")
    output.say("nor this")
