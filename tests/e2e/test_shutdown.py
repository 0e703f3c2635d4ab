"""How a pipeline ends: in order when asked, at once when pressed, and with its parent."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import SIMULATED, Served, expected, is_running, wait_until

from contract.domain.params import SamplingParams
from penstock.client import Delta

PROMPT = [10, 20, 30]


@pytest.fixture
def served(checkpoint: Path, tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, f"--model={checkpoint}", "--step-ms=5", "--drain-timeout-s=300", *SIMULATED) as served:
        yield served.wait_ready()


def test_sigterm_finishes_what_is_in_flight_and_leaves_nothing(served: Served) -> None:
    pids = served.pids()
    assert len(pids) == 6
    with served.client() as client:
        events = client.generate(PROMPT, SamplingParams(temperature=0, max_tokens=100))
        deltas = []
        for event in events:
            if isinstance(event, Delta):
                if not deltas:
                    served.process.send_signal(signal.SIGTERM)
                deltas.append(event)
    assert [token_id for delta in deltas for token_id in delta.token_ids] == expected(PROMPT, 100)
    assert served.process.wait(300) == 0
    assert not [name for name, pid in pids.items() if is_running(pid)]
    ended = [line.split("-0 |")[0].strip() for line in served.err.splitlines() if line.endswith("] ended")]
    assert ended == ["gateway", "tokenizer", "scheduler", "worker", "detokenizer"]
    data_dir = Path(served.err.split("unix://")[1].split()[0]).parent
    assert not data_dir.exists()


def test_a_second_signal_kills(served: Served) -> None:
    pids = served.pids()
    with served.client() as client:
        events = client.generate(PROMPT, SamplingParams(max_tokens=4000, ignore_eos=True))
        next(events)
        next(events)
        served.process.send_signal(signal.SIGINT)
        wait_until(lambda: "a second signal kills" in served.err, "stopping")
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(300) == 128 + signal.SIGINT
    assert not [name for name, pid in pids.items() if is_running(pid)]


def test_children_do_not_outlive_a_launcher_that_was_killed(served: Served) -> None:
    pids = served.pids()
    served.process.kill()
    served.process.wait()
    wait_until(lambda: not any(map(is_running, pids.values())), "children gone")
