"""Two processes of each service on one server: both get work."""

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from served import LONG_LEASES, SIMULATED, Served, expected, wait_until

from contract.domain.params import SamplingParams
from penstock.client import Client

KINDS = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")
WORK = {
    "gateway": "delivered_tokens_total",
    "tokenizer": "tokenizer_prompts_total",
    "scheduler": "generated_tokens_total",
    "worker": "sampled_tokens",
    "detokenizer": "detokenized_tokens_total",
}
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = (f"--model={checkpoint}", "--step-ms=2", LONG_LEASES, *SIMULATED, *(f"--{kind}s=2" for kind in KINDS))
    with Served(tmp_path_factory.mktemp("several"), *flags) as served:
        yield served.wait_ready()


def work(served: Served) -> dict[str, list[float]]:
    """What each process has done, by kind."""
    with served.client() as client:
        sessions = client.pipeline().sessions
    done = defaultdict(list)
    for session in sessions:
        if session.alive:
            done[session.kind].append(session.status.figures.get(WORK[session.kind], 0.0))
    return done


def test_both_of_each_get_work(served: Served) -> None:
    def complete(number: int) -> list[int]:
        address = served.grpc_addresses[number % 2]
        with Client(address) as client:
            return list(client.complete(prompt(number), params, timeout_s=120).outputs[0].token_ids)

    def prompt(number: int) -> list[int]:
        return [1 + number % 249, 7 + number // 249 % 240]

    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    numbers = count()

    def have_worked() -> bool:
        batch = [next(numbers) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(complete, batch)) == [expected(prompt(number), NUM_TOKENS) for number in batch]
        done = work(served)
        return all(len(done[kind]) == 2 and min(done[kind]) > 0 for kind in KINDS)

    try:
        wait_until(have_worked, "all have worked")
    except AssertionError as error:
        raise AssertionError(f"{error}; they did {work(served)}") from error
