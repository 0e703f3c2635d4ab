"""Two ranks of one worker: whichever is killed, at work or idle, both come again and streams go on."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch
from near_the_likeliest import MAX_GAP
from served import LIMIT_S, Served, wait_until
from teacher import Answered, expected_logprobs, gaps
from transformers import AutoModelForCausalLM, PreTrainedModel
from two_gpus import needs_two_gpus

import penstock
from contract.domain.params import SamplingParams
from penstock.client import Delta

NUM_TOKENS = 300
PROMPT_IDS = list(range(5, 15))
RANKS = ("worker-0.0", "worker-0.1")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=needs_two_gpus)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[Served]:
    """The bundled model; on GPUs ranks exchange within CUDA graphs, of which torch watches none."""
    flags = ("--tensor-parallel-size=2", f"--device={device}", "--num-threads=1", "--session-ttl-s=5")
    with Served(tmp_path_factory.mktemp("ranks"), *flags) as served:
        yield served.wait_ready()


@pytest.fixture(scope="module")
def teacher() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        Path(penstock.__file__).parent / "bundled_model", dtype=torch.float32
    )
    return model


@pytest.fixture(scope="module")
def expected(served: Served) -> list[int]:
    return generate(served, [], Event())


def generate(served: Served, token_ids: list[int], begun: Event) -> list[int]:
    """What comes, also in `token_ids` meanwhile; `begun` once something has."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
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
def test_a_stream_goes_on_when_a_rank_is_killed(
    served: Served, expected: list[int], victim: str, teacher: PreTrainedModel, device: str
) -> None:
    token_ids: list[int] = []
    begun = Event()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(generate, served, token_ids, begun)
        assert begun.wait(LIMIT_S)
        num_sent = len(token_ids)
        kill(served, victim)
        found = stream.result()
    assert len(found) == NUM_TOKENS
    # On a GPU what is computed again is rounded otherwise, and another token may then be as likely.
    rounds = device == "cuda"
    num_equal = num_sent if rounds else NUM_TOKENS
    assert found[:num_equal] == expected[:num_equal]
    answer = Answered(PROMPT_IDS, found)
    assert float(gaps(expected_logprobs(teacher, answer), answer).max()) < (MAX_GAP if rounds else 1e-3)


@pytest.mark.parametrize("victim", RANKS)
def test_no_rank_waits_for_ever_for_one_that_was_killed_while_nothing_was_asked(
    served: Served, expected: list[int], victim: str
) -> None:
    before = kill(served, victim)
    wait_until(lambda: all(served.pids()[rank] != before[rank] for rank in RANKS), "both ranks are others", 4 * LIMIT_S)
    assert generate(served, [], Event()) == expected
