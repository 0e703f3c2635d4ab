"""kill -9 of each process under load: what was in flight goes on or ends with a typed error, and new requests work."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import pytest
from served import LIMIT_S, SIMULATED, Served, expected, wait_until

from contract.domain.errors import Fault, PenstockError
from contract.domain.params import SamplingParams
from penstock.client import Delta

NUM_CLIENTS = 8
NUM_TOKENS = 400
END_TIMEOUT_S = 2 * LIMIT_S
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    timing = ("--step-ms=5", "--session-ttl-s=10", "--reclaim-after-s=1", "--compact-entries=16")
    flags = (f"--model={checkpoint}", *timing, *SIMULATED)
    with Served(tmp_path_factory.mktemp("deaths"), *flags) as served:
        yield served.wait_ready()


@dataclass
class Story:
    """What one client saw."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    gaps: int = 0
    begun: Event = field(default_factory=Event)  # with its first token, or its end
    error: PenstockError | None = None


def watch(served: Served, story: Story) -> None:
    with served.client() as client:
        try:
            for event in client.generate(story.prompt_ids, PARAMS, timeout_s=END_TIMEOUT_S):
                if isinstance(event, Delta):
                    story.gaps += event.token_offset != len(story.token_ids)
                    story.token_ids.extend(event.token_ids)
                    story.begun.set()
        except PenstockError as error:
            story.error = error
            story.begun.set()


def works_again(served: Served) -> bool:
    try:
        with served.client() as client:
            generation = client.complete([1, 2, 3], SamplingParams(temperature=0, max_tokens=5), timeout_s=60.0)
    except PenstockError as error:
        if error.fault is not Fault.NOBODY:
            raise
        return False
    return generation.outputs[0].token_ids == expected([1, 2, 3], 5)


@pytest.mark.parametrize("victim", ["gateway-0", "tokenizer-0", "scheduler-0", "worker-0", "detokenizer-0", "server"])
def test_a_killed_process_costs_at_most_a_typed_error_within_seconds(served: Served, victim: str) -> None:
    wait_until(lambda: works_again(served), "works before")
    pid = served.pids()[victim]
    stories = [Story([index + 1, 7, 9]) for index in range(NUM_CLIENTS)]
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        watches = [pool.submit(watch, served, story) for story in stories]
        for story in stories:
            assert story.begun.wait(LIMIT_S)
        os.kill(pid, signal.SIGKILL)
        for each in watches:
            each.result()
    for story in stories:
        assert story.gaps == 0
        assert story.token_ids == expected(story.prompt_ids, NUM_TOKENS)[: len(story.token_ids)]
        if story.error is None:
            assert len(story.token_ids) == NUM_TOKENS
        else:
            # Not the deadline of this test: that would be a request that hung.
            assert story.error.code.name != "DEADLINE_EXCEEDED"
            assert story.error.fault is Fault.NOBODY, story.error.message
    wait_until(lambda: served.pids()[victim] != pid, "restarted")
    wait_until(lambda: works_again(served), "works again")
