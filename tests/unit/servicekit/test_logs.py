import io
import json
import logging
from collections.abc import Iterator
from threading import Thread

import pytest
import structlog

from servicekit import logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_carry_what_is_bound() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream=stream, service="worker")
    with structlog.contextvars.bound_contextvars(request_id="ab"):
        structlog.stdlib.get_logger("x").info("hello", blocks=3)
    (line,) = lines(stream)
    assert (line["event"], line["level"], line["service"]) == ("hello", "info", "worker")
    assert (line["request_id"], line["blocks"]) == ("ab", 3)


def test_other_threads_and_libraries_log_into_the_same_lines() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream=stream, service="worker")
    thread = Thread(target=lambda: logging.getLogger("library").warning("%d retries", 2))
    thread.start()
    thread.join()
    (line,) = lines(stream)
    assert (line["event"], line["service"], line["level"]) == ("2 retries", "worker", "warning")


def test_below_the_level_nothing_is_written() -> None:
    stream = io.StringIO()
    logs.configure("warning", "json", stream=stream)
    structlog.stdlib.get_logger("x").info("quiet")
    logging.getLogger("y").info("quiet")
    assert stream.getvalue() == ""


def test_a_traceback_and_any_value_fit_into_one_json_line() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream=stream)
    try:
        int("broken")
    except ValueError:
        structlog.stdlib.get_logger("x").exception("failed", value=object)
    (line,) = lines(stream)
    assert "invalid literal for int() with base 10: 'broken'" in str(line["exception"])
    assert line["value"] == "<class 'object'>"


def test_a_readable_traceback_shows_no_local_variables() -> None:
    stream = io.StringIO()
    logs.configure("info", "console", stream=stream)
    secret = "what a client sent"
    try:
        int(secret[:0])
    except ValueError:
        structlog.stdlib.get_logger("x").exception("failed")
    assert "ValueError: invalid literal for int()" in stream.getvalue()
    assert secret not in stream.getvalue()


def test_readable_lines_are_no_json_and_have_no_colors_outside_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    stream = io.StringIO()
    logs.configure("info", "console", stream=stream)
    structlog.stdlib.get_logger("x").info("hello", blocks=3)
    assert "hello" in stream.getvalue()
    assert "blocks=3" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_auto_means_json_outside_of_a_terminal() -> None:
    stream = io.StringIO()
    logs.configure("info", "auto", stream=stream)
    structlog.stdlib.get_logger("x").info("hello")
    assert lines(stream)[0]["event"] == "hello"
