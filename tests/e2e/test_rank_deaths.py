"""Two ranks of one worker: whichever is killed, at work or idle, both come again and streams go on."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from served import LIMIT_S, Served, wait_until

from contract.domain.params import SamplingParams
from penstock.client import Delta

NUM_TOKENS = 300
PROMPT_IDS = list(range(5, 15))
RANKS = ("worker-0.0", "worker-0.1")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The bundled model."""
    flags = ("--tensor-parallel-size=2", "--device=cpu", "--num-threads=1", "--session-ttl-s=5")
    with Served(tmp_path_factory.mktemp("ranks"), *flags) as served:
        yield served.wait_ready()


@pytest.fixture(scope="module")
def expected(served: Served) -> list[int]:
    return generate(served, Event())


def generate(served: Served, begun: Event) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    token_ids: list[int] = []
    with served.client() as client:
        for event in client.generate(PROMPT_IDS, params, timeout_s=4 * LIMIT_S):
            if isinstance(event, Delta):
                assert event.token_offset == len(token_ids)
                token_ids.extend(event.token_ids)
                begun.set()
    return token_ids


def kill(served: Served, victim: str) -> dict[str, int]:
    """The processes that were there before."""
    before = served.pids()
    os.kill(before[victim], signal.SIGKILL)
    return before


@pytest.mark.parametrize("victim", RANKS)
def test_a_stream_goes_on_when_a_rank_is_killed(served: Served, expected: list[int], victim: str) -> None:
    begun = Event()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(generate, served, begun)
        assert begun.wait(LIMIT_S)
        kill(served, victim)
        assert stream.result() == expected


@pytest.mark.parametrize("victim", RANKS)
def test_no_rank_waits_for_ever_for_one_that_was_killed_while_nothing_was_asked(
    served: Served, expected: list[int], victim: str
) -> None:
    before = kill(served, victim)
    wait_until(lambda: all(served.pids()[rank] != before[rank] for rank in RANKS), "both ranks are others", 4 * LIMIT_S)
    assert generate(served, Event()) == expected
