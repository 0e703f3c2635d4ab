"""Engines run in processes of their own, so that each has the card for itself; they answer with lines of JSON."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

MARK = "RESULT "  # begins a line that is an answer; everything else is what the process had to say
SHOWN = 3000  # characters of its last words


class ChildError(Exception):
    """It ended badly or took too long; the text has its last words."""

    def __init__(self, message: str, answers: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.answers = list(answers)  # until then


def answer(**values: Any) -> None:
    """Called in the child: one answer."""
    print(MARK + json.dumps(values), flush=True)


def request() -> dict[str, Any]:
    """Called in the child: what it was started for."""
    found: dict[str, Any] = json.loads(sys.stdin.read())
    return found


def ask(
    command: Sequence[str], asked: dict[str, Any], timeout_s: float, environ: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Runs a child with `environ` on top of this process's; its answers.

    Raises:
        ChildError: it did not end with status 0 in time.
    """
    with tempfile.TemporaryFile("w+") as words:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            env=os.environ | (environ or {}),
            start_new_session=True,
        )
        # It may have children: the whole session ends with it.
        timer = threading.Timer(timeout_s, _kill, [child.pid])
        timer.start()
        try:
            output, _ = child.communicate(json.dumps(asked))
        finally:
            timer.cancel()
            _kill(child.pid)
        lines = output.splitlines()
        answers = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
        if child.returncode != 0:
            words.seek(0)
            said = "\n".join(line for line in lines if not line.startswith(MARK)) + words.read()
            raise ChildError(f"{' '.join(command[:4])} ended with {child.returncode}: {said[-SHOWN:]}", answers)
    return answers


def _kill(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
