"""One child of the launcher, with small programs in place of services."""

import asyncio
import contextlib
import dataclasses
import io
import os
import signal
import sys
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from contract.domain.errors import PenstockError
from penstock.launcher import replica as replicas
from penstock.launcher.layout import Child
from penstock.launcher.output import Output
from penstock.launcher.replica import Replica
from servicekit.bus.calls import SessionKind

CHILD = Child(SessionKind.WORKER, "worker-0", (), "", "", "", "127.0.0.1:1", "host-1-worker-0", "", "redis://h")
SLEEP = "import time; print('up', flush=True); time.sleep(100)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(100)"
)


class Fixture:
    def __init__(self, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replicas, "python_command", lambda _child: [sys.executable, "-c", program])
        self.stream = io.StringIO()
        self.mourned: list[str] = []
        self.replica = Replica(CHILD, Output(stream=self.stream), 0.02, self.mourn)

    async def mourn(self, child: Child) -> None:
        self.mourned.append(f"{child.name} after {len(self.pids())}")

    @property
    def said(self) -> str:
        return self.stream.getvalue()

    async def until(self, text: str, times: int = 1) -> None:
        async with asyncio.timeout(180):
            while self.said.count(text) < times:
                await asyncio.sleep(0.01)

    def pids(self) -> list[int]:
        return [int(line.split("(pid ")[1].rstrip(")")) for line in self.said.splitlines() if "(pid " in line]


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def test_what_a_child_writes_is_relayed_up_to_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; print('one'); print('x' * 200000); sys.stderr.write('no newline'); sys.exit(2)"
    fixture = Fixture(program, monkeypatch)

    async def test() -> None:
        with pytest.raises(PenstockError, match="worker-0 cannot start \\(exit status 2\\)"):
            await fixture.replica.run()
        assert "worker-0 | one\n" in fixture.said
        assert "x" * 200000 in fixture.said
        assert "worker-0 | no newline\n" in fixture.said

    run(test())


def test_children_are_not_given_what_kubernetes_injects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("PENSTOCK_POOL", "p")
    fixture = Fixture(
        "import os; print(sorted(name for name in os.environ if name.startswith('PENSTOCK_P')))", monkeypatch
    )

    async def test() -> None:
        life = asyncio.create_task(fixture.replica.run())
        await fixture.until("| ['PENSTOCK_POOL']")
        fixture.replica.kill()
        await asyncio.wait_for(life, 60)

    run(test())


def test_a_child_that_dies_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Fixture(SLEEP, monkeypatch)

    async def test() -> None:
        life = asyncio.create_task(fixture.replica.run())
        await fixture.until("| up")
        os.kill(fixture.pids()[0], signal.SIGKILL)
        await fixture.until("| up", times=2)
        assert "died (signal SIGKILL): starting it again in 0.02 s" in fixture.said
        assert fixture.mourned == ["worker-0 after 1"]
        await fixture.replica.stop(5.0)
        await asyncio.wait_for(life, 60)

    run(test())


@pytest.mark.parametrize("answer", [False, None], ids=["stalled", "silent"])
def test_a_child_that_hangs_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch, answer: bool | None) -> None:
    fixture = Fixture(SLEEP, monkeypatch)
    monkeypatch.setattr(replicas, "PROBE_INTERVAL_S", 0.01)
    hangs = False

    async def ask(path: str) -> bool | None:
        return answer if hangs else True

    monkeypatch.setattr(fixture.replica, "_ask", ask)

    async def test() -> None:
        nonlocal hangs
        life = asyncio.create_task(fixture.replica.run())
        await fixture.until("| up")
        assert await fixture.replica.is_ready()
        hangs = True
        await fixture.until("| up", times=2)
        why = "it does not answer" if answer is None else "it makes no progress"
        assert f"worker-0 hangs, {why}: killing it" in fixture.said
        fixture.replica.kill()
        await asyncio.wait_for(life, 60)

    run(test())


@pytest.mark.parametrize("answer", [False, None], ids=["stalled", "silent"])
def test_questions_of_a_launcher_that_stood_still_itself_do_not_count(
    monkeypatch: pytest.MonkeyPatch, answer: bool | None
) -> None:
    fixture = Fixture(SLEEP, monkeypatch)
    monkeypatch.setattr(replicas, "PROBE_INTERVAL_S", 0.01)
    num_asked, stands_still, now_s = 0, True, 0.0
    monkeypatch.setattr(replicas, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def ask(path: str) -> bool | None:
        nonlocal num_asked, now_s
        if path == "/ready":
            return True
        num_asked += 1
        now_s += 600.0 if stands_still else 0.0
        return answer

    monkeypatch.setattr(fixture.replica, "_ask", ask)

    async def test() -> None:
        nonlocal stands_still
        life = asyncio.create_task(fixture.replica.run())
        await fixture.until("| up")
        assert await fixture.replica.is_ready()
        async with asyncio.timeout(180):
            while num_asked < 10:
                await asyncio.sleep(0.01)
        assert "hangs" not in fixture.said
        stands_still = False
        await fixture.until("hangs")
        fixture.replica.kill()
        await asyncio.wait_for(life, 60)

    run(test())


def test_a_child_is_asked_three_times_in_vain_before_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Fixture(SLEEP, monkeypatch)
    monkeypatch.setattr(replicas, "PROBE_INTERVAL_S", 0.01)
    monkeypatch.setattr(replicas, "time", SimpleNamespace(monotonic=lambda: 0.0))  # this process never stands still
    answers = [True, None, None, True, None, None, None]

    async def ask(path: str) -> bool | None:
        return True if path == "/ready" or not answers else answers.pop(0)

    monkeypatch.setattr(fixture.replica, "_ask", ask)

    async def test() -> None:
        life = asyncio.create_task(fixture.replica.run())
        await fixture.until("hangs, it does not answer")
        assert not answers
        fixture.replica.kill()
        await asyncio.wait_for(life, 60)

    run(test())


def test_a_child_that_was_never_ready_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Fixture(SLEEP, monkeypatch)
    monkeypatch.setattr(replicas, "PROBE_INTERVAL_S", 0.01)
    asked = []

    async def ask(path: str) -> None:
        asked.append(path)

    monkeypatch.setattr(fixture.replica, "_ask", ask)

    async def test() -> None:
        life = asyncio.create_task(fixture.replica.run())
        async with asyncio.timeout(180):
            while len(asked) < 5:
                await asyncio.sleep(0.01)
        assert "hangs" not in fixture.said
        fixture.replica.kill()
        await asyncio.wait_for(life, 60)

    run(test())


def test_a_child_may_take_its_time_in_its_second_life_as_in_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Fixture(SLEEP, monkeypatch)
    monkeypatch.setattr(replicas, "PROBE_INTERVAL_S", 0.01)
    num_unanswered = 0

    async def ask(path: str) -> bool | None:
        nonlocal num_unanswered
        if len(fixture.pids()) == 1 or num_unanswered > 50:
            return True
        num_unanswered += 1
        return None if num_unanswered % 2 else False  # imports hold the lock, then nothing has turned yet

    monkeypatch.setattr(fixture.replica, "_ask", ask)

    async def test() -> None:
        life = asyncio.create_task(fixture.replica.run())
        await fixture.until("| up")
        assert await fixture.replica.is_ready()
        os.kill(fixture.pids()[0], signal.SIGKILL)
        async with asyncio.timeout(180):
            while num_unanswered <= 50:
                await asyncio.sleep(0.01)
        assert "hangs" not in fixture.said
        assert len(fixture.pids()) == 2
        fixture.replica.kill()
        await asyncio.wait_for(life, 60)

    run(test())


def test_a_second_life_that_hangs_after_it_was_ready_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Fixture(SLEEP, monkeypatch)
    monkeypatch.setattr(replicas, "PROBE_INTERVAL_S", 0.01)
    answers: list[bool | None] = [None] * 5 + [True, True]  # of the second life, which nobody else asks

    async def ask(path: str) -> bool | None:
        if len(fixture.pids()) == 1:
            return True
        return answers.pop(0) if answers else None

    monkeypatch.setattr(fixture.replica, "_ask", ask)

    async def test() -> None:
        life = asyncio.create_task(fixture.replica.run())
        await fixture.until("| up")
        os.kill(fixture.pids()[0], signal.SIGKILL)
        await fixture.until("| up", times=2)
        await fixture.until("worker-0 hangs, it does not answer: killing it")
        fixture.replica.kill()
        await asyncio.wait_for(life, 60)

    run(test())


def test_killing_a_child_that_has_just_ended_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its end and the loop's notice of it."""
    fixture = Fixture(SLEEP, monkeypatch)

    async def test() -> None:
        life = asyncio.create_task(fixture.replica.run())
        await fixture.until("| up")
        killpg, asked = os.killpg, []

        def kill_one_that_is_gone(pid: int, number: int) -> None:
            asked.append(pid)
            killpg(pid, number)
            raise ProcessLookupError

        monkeypatch.setattr(os, "killpg", kill_one_that_is_gone)
        fixture.replica.kill()
        await asyncio.wait_for(life, 60)
        assert asked[0] == fixture.pids()[0]

    run(test())


def test_a_child_that_never_gets_ready_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Fixture("raise SystemExit(1)", monkeypatch)

    async def test() -> None:
        with pytest.raises(PenstockError, match="exit status 1"):
            await fixture.replica.run()
        assert len(fixture.pids()) == replicas.MAX_FIRST_TRIES

    run(test())


def test_a_child_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Fixture(STUBBORN, monkeypatch)
    monkeypatch.setattr(replicas, "KILL_AFTER_S", 0.05)

    async def test() -> None:
        life = asyncio.create_task(fixture.replica.run())
        await fixture.until("| up")
        await fixture.replica.stop(0.0)
        assert "does not end: killing it" in fixture.said
        await asyncio.wait_for(life, 60)
        assert len(fixture.pids()) == 1

    run(test())


def test_what_a_child_started_does_not_outlive_it(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import subprocess, sys, time\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "print('other', other.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    fixture = Fixture(program, monkeypatch)

    async def test() -> None:
        life = asyncio.create_task(fixture.replica.run())
        await fixture.until("| other")
        other = int(fixture.said.split("other ")[1].split()[0])
        os.kill(fixture.pids()[0], signal.SIGKILL)
        await fixture.until("died")
        async with asyncio.timeout(180):
            while is_running(other):
                await asyncio.sleep(0.01)
        fixture.replica.kill()
        await asyncio.wait_for(life, 60)

    run(test())


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("reply", "expected"),
    [(b"HTTP/1.0 200 OK\r\n\r\n", True), (b"HTTP/1.0 503 No\r\n\r\n", False), (b"", None), (None, None)],
    ids=["yes", "no", "hung up", "silent"],
)
def test_a_child_is_asked_over_http(
    monkeypatch: pytest.MonkeyPatch, reply: bytes | None, expected: bool | None
) -> None:
    asked = []
    ended = asyncio.Event()
    monkeypatch.setattr(replicas, "ANSWER_S", 20.0 if reply is not None else 0.1)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):  # it gave up before it had asked
            asked.append(await reader.readuntil(b"\r\n\r\n"))
        if reply is None:
            await reader.read()  # until the other side gives up
        writer.write(reply or b"")
        writer.close()
        await writer.wait_closed()
        ended.set()

    async def test() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            child = dataclasses.replace(CHILD, health_address=f"127.0.0.1:{port}")

            async def mourn(_child: Child) -> None:
                pass

            replica = Replica(child, Output(stream=io.StringIO()), 0.02, mourn)
            assert await replica._ask("/health") is expected
            await ended.wait()
            while reply is None and not asked:  # the short patience ran out before a question was sent
                ended.clear()
                assert await replica._ask("/health") is expected
                await ended.wait()
        assert asked == [b"GET /health HTTP/1.0\r\n\r\n"]

    run(test())


def test_nobody_is_ready_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Fixture(SLEEP, monkeypatch)

    async def test() -> None:
        assert not await fixture.replica.is_ready()

    run(test())
