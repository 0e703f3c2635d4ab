"""Requests that kill workers or hang devices: they end with an error, all others as if nothing had happened."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from served import EOS, LIMIT_S, LONG_LEASES, SIMULATED, VOCAB_SIZE, Served, expected, wait_until

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import SamplingParams
from penstock.client import Delta

NUM_CLIENTS = 6
NUM_TOKENS = 200
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [[number + 1, 7, 9] for number in range(NUM_CLIENTS)]
POISON = min(set(range(1, VOCAB_SIZE)) - {EOS, *range(10)} - {t for p in PROMPTS for t in expected(p, NUM_TOKENS)})
FLAGS = ("--step-ms=5", "--workers=2", "--max-restart-pause-s=0.2", LONG_LEASES, *SIMULATED)
FAULTS = {"die": (f"--die-on-token={POISON}",), "hang": (f"--hang-on-token={POISON}", "--step-timeout-s=5")}


@pytest.fixture(params=FAULTS)
def served(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, f"--model={checkpoint}", *FLAGS, *FAULTS[request.param]) as served:
        yield served.wait_ready()


def complete(served: Served, prompt_ids: list[int]) -> list[int] | PenstockError:
    with served.client() as client:
        try:
            return list(client.complete(prompt_ids, PARAMS, timeout_s=2 * LIMIT_S).outputs[0].token_ids)
        except PenstockError as error:
            return error


def test_a_request_that_ends_every_worker_is_given_up_and_the_others_finish(served: Served) -> None:
    with ThreadPoolExecutor(NUM_CLIENTS + 1) as pool:
        innocent = [pool.submit(complete, served, prompt) for prompt in PROMPTS]
        at_fault = pool.submit(complete, served, [1, POISON]).result()
        assert [each.result() for each in innocent] == [expected(prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert isinstance(at_fault, PenstockError)
    assert at_fault.code is ErrorCode.INTERNAL, at_fault.message
    assert "4 workers died while they computed this request, the last 2 while it ran alone" in at_fault.message

    def num_deaths() -> int:
        return sum(line.startswith("worker-") and " died (" in line for line in served.err.splitlines())

    wait_until(lambda: num_deaths() >= 4, "the last death is noticed")
    assert num_deaths() == 4


def test_a_long_request_outlives_more_workers_than_one_that_kills_them(checkpoint: Path, tmp_path: Path) -> None:
    """Each dies for another reason, when the request has gone on well for a while."""
    num_deaths, tokens_between, num_tokens = 6, 20, 1500
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    flags = ("--step-ms=5", "--forgiven-after-tokens=10", "--max-restart-pause-s=0.2", LONG_LEASES, *SIMULATED)
    with Served(tmp_path, f"--model={checkpoint}", *flags) as served, served.wait_ready().client() as client:
        token_ids: list[int] = []
        killed: list[int] = []
        enough = tokens_between
        for event in client.generate(PROMPTS[0], params):
            if not isinstance(event, Delta):
                continue
            token_ids += event.token_ids
            if len(killed) < num_deaths and len(token_ids) > enough:
                wait_until(lambda: served.pids()["worker-0"] not in killed, "the next life")
                killed.append(served.pids()["worker-0"])
                os.kill(killed[-1], signal.SIGKILL)
                enough = len(token_ids) + tokens_between  # what came at once counts for one death
    assert len(set(killed)) == num_deaths
    assert token_ids == expected(PROMPTS[0], num_tokens)
