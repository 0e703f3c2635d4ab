"""Streams go on while the chart's Valkey fails over: a whole pipeline on its servers and Sentinels, with clients."""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from redis.exceptions import RedisError
from served import LONG_LEASES, SIMULATED, Served, expected, write_checkpoint
from test_valkey_failover import (
    all_at_once,
    back_at_once_but_empty,
    ended_in_order,
    killed,
    one_sentinel_lost,
    one_sentinel_paused,
    paused,
    sentinels_paused,
)
from valkeys import NAME, Pod, Valkeys, wait_until

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import SamplingParams
from penstock.client import Delta

ROUNDS = int(os.environ.get("VALKEY_ROUNDS", "1"))
NUM_CLIENTS = 6
NUM_TOKENS = 300  # of 10 ms: about as long as a failover takes
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def valkeys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkeys]:
    with Valkeys(tmp_path_factory.mktemp("valkeys")) as valkeys:
        valkeys.start()
        valkeys.wait_whole()
        yield valkeys


@pytest.fixture(scope="module")
def served(valkeys: Valkeys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tmp_path_factory.mktemp("model")
    write_checkpoint(model)
    flags = (f"--model={model}", f"--redis-url={valkeys.url}", "--step-ms=10", LONG_LEASES, *SIMULATED)
    flags += ("--orphan-grace-s=600",)
    with Served(tmp_path_factory.mktemp("served"), *flags) as served:
        yield served.wait_ready()


class Clients:
    """Each asks again and again; every token that comes must be the one that is due."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._stopping = threading.Event()
        self._prompts = itertools.count(1)
        self.num_begun = self.num_ended = 0
        self.wrongs: list[str] = []
        self._threads = [threading.Thread(target=self._ask_for_ever) for _ in range(NUM_CLIENTS)]

    def __enter__(self) -> "Clients":
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for each in self._threads:
            each.join()

    def wait_for_more(self, count: int) -> None:
        """Until so many more streams have ended."""
        wanted = self.num_ended + count
        wait_until(lambda: self.num_ended >= wanted or self.wrongs, "streams end")

    def _ask_for_ever(self) -> None:
        while not self._stopping.is_set() and not self.wrongs:
            prompt = [next(self._prompts) % 250 + 1, 7, 9]
            tokens: list[int] = []
            try:
                with self._served.client() as client:
                    for event in client.generate(prompt, PARAMS):
                        if isinstance(event, Delta):
                            if event.token_offset != len(tokens):
                                self.wrongs.append(f"{prompt}: offset {event.token_offset} after {len(tokens)} tokens")
                            tokens.extend(event.token_ids)
            except PenstockError as error:
                # Without a server nothing new is taken in; what was taken in goes on.
                if tokens or error.code is not ErrorCode.UNAVAILABLE:
                    self.wrongs.append(f"{prompt}: after {len(tokens)} tokens {error.code.name}: {error.message}")
                time.sleep(0.2)
                continue
            if tokens != expected(prompt, NUM_TOKENS):
                self.wrongs.append(f"{prompt}: {len(tokens)} tokens, not those that are due")
            self.num_ended += 1


def promoted_again_and_again(valkeys: Valkeys, primary: Pod) -> None:
    """Two servers take writes for a while, and clients are sent from one to the other and back."""
    wait_until(valkeys.knows_replicas, "all Sentinels have asked the primary for its replicas")
    for _ in range(6):
        with valkeys.sentinels[0].client() as client, contextlib.suppress(RedisError):  # one is under way
            client.execute_command("SENTINEL", "FAILOVER", NAME)
        time.sleep(1)


@pytest.mark.parametrize(
    "fault",
    [
        promoted_again_and_again,
        killed,
        paused,
        back_at_once_but_empty,
        ended_in_order,
        all_at_once,
        one_sentinel_lost,
        sentinels_paused,
        one_sentinel_paused,
    ],
    ids=lambda fault: fault.__name__,
)
def test_no_stream_ends_or_changes_while_the_server_fails_over(
    valkeys: Valkeys, served: Served, fault: Callable[[Valkeys, Pod], None]
) -> None:
    with Clients(served) as clients:
        for _ in range(ROUNDS):
            clients.wait_for_more(1)
            fault(valkeys, valkeys.wait_whole())
            valkeys.wait_whole()
            clients.wait_for_more(NUM_CLIENTS)
            assert not clients.wrongs
