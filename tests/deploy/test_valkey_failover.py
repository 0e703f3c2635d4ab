"""One primary, and never an empty one over data: the chart's scripts with real servers and Sentinels."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis.exceptions import ResponseError
from valkeys import NAME, Pod, Valkeys, Writes, wait_until

ROUNDS = int(os.environ.get("VALKEY_ROUNDS", "1"))  # 20 is what the chart was released with


@pytest.fixture
def valkeys(tmp_path: Path) -> Iterator[Valkeys]:
    with Valkeys(tmp_path) as valkeys:
        valkeys.start()
        yield valkeys


def other(valkeys: Valkeys, server: Pod) -> Pod:
    (found,) = (each for each in valkeys.servers if each is not server)
    return found


def killed(valkeys: Valkeys, primary: Pod) -> None:
    primary.kill()
    wait_until(lambda: other(valkeys, primary).info().get("role") == "master", "the replica takes over")
    primary.start()


def killed_and_back_at_once(valkeys: Valkeys, primary: Pod) -> None:
    primary.kill()
    primary.start()


def back_at_once_but_empty(valkeys: Valkeys, primary: Pod) -> None:
    primary.kill()
    primary.empty()
    primary.start()


def paused(valkeys: Valkeys, primary: Pod) -> None:
    primary.signal(signal.SIGSTOP)
    wait_until(lambda: other(valkeys, primary).info().get("role") == "master", "the replica takes over")
    primary.signal(signal.SIGCONT)


def ended_in_order(valkeys: Valkeys, primary: Pod) -> None:
    wait_until(valkeys.knows_replicas, "all Sentinels have asked the primary for its replicas")
    primary.stop()
    # It was handed over before it ended.
    role = wait_until(other(valkeys, primary).info, "the replica answers")["role"]
    assert role == "master", valkeys.describe()
    primary.start()


def replica_emptied(valkeys: Valkeys, primary: Pod) -> None:
    replica = other(valkeys, primary)
    replica.kill()
    replica.empty()
    replica.start()


def all_at_once(valkeys: Valkeys, primary: Pod) -> None:
    """Sentinels forget everything; disks do not."""
    for each in (*valkeys.servers, *valkeys.sentinels):
        each.kill()
    for each in (*valkeys.sentinels, *valkeys.servers):
        each.start()


def all_at_once_and_the_primary_empty(valkeys: Valkeys, primary: Pod) -> None:
    for each in (*valkeys.servers, *valkeys.sentinels):
        each.kill()
    primary.empty()
    for each in (*valkeys.servers, *valkeys.sentinels):
        each.start()


def sentinels_lost(valkeys: Valkeys, primary: Pod) -> None:
    for each in valkeys.sentinels:
        each.kill()
    for each in valkeys.sentinels:
        each.start()


def one_sentinel_lost(valkeys: Valkeys, primary: Pod) -> None:
    valkeys.sentinels[0].kill()
    valkeys.sentinels[0].start()


def sentinels_paused(valkeys: Valkeys, primary: Pod) -> None:
    """The primary ends while all Sentinels are suspended: nobody is promoted until they go on."""
    for each in valkeys.sentinels:
        each.signal(signal.SIGSTOP)
    primary.kill()
    wait_until(lambda: other(valkeys, primary).info().get("master_link_status") == "down", "the replica misses it")
    assert wait_until(other(valkeys, primary).info, "the replica answers")["role"] == "slave"
    for each in valkeys.sentinels:
        each.signal(signal.SIGCONT)
    wait_until(lambda: other(valkeys, primary).info().get("role") == "master", "the replica takes over")
    primary.start()


def one_sentinel_paused(valkeys: Valkeys, primary: Pod) -> None:
    """The others promote without it; it goes on with what it knew before."""
    wait_until(valkeys.knows_replicas, "all Sentinels have asked the primary for its replicas")
    valkeys.sentinels[0].signal(signal.SIGSTOP)
    killed(valkeys, primary)
    valkeys.sentinels[0].signal(signal.SIGCONT)


FAULTS = [
    killed,
    killed_and_back_at_once,
    back_at_once_but_empty,
    paused,
    ended_in_order,
    replica_emptied,
    all_at_once,
    all_at_once_and_the_primary_empty,
    sentinels_lost,
    one_sentinel_lost,
    sentinels_paused,
    one_sentinel_paused,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_was_copied_is_never_lost(valkeys: Valkeys, fault: Callable[[Valkeys, Pod], None]) -> None:
    writes = Writes(valkeys, on_disks=True)
    for _ in range(ROUNDS):
        fault(valkeys, writes.add())
        writes.assert_kept()


def test_a_pool_finds_the_primary_with_its_own_password_and_rights(valkeys: Valkeys) -> None:
    valkeys.wait_until(valkeys.is_found, "a pool finds the primary")
    set_run, refused = ("SET", f"{{{NAME}}}:run", "1"), re.compile(r"permission|NOPERM", re.IGNORECASE)
    assert valkeys.ask_primary("services", *set_run) == "True"
    for command in (("SET", "elsewhere", "1"), ("CONFIG", "GET", "*"), ("FLUSHALL",), ("REPLICAOF", "NO", "ONE")):
        assert refused.search(valkeys.ask_primary("services", *command))
    assert "redis_version" in valkeys.ask_primary("scaler", "INFO", "server")
    assert refused.search(valkeys.ask_primary("scaler", *set_run))


def test_probes_say_who_serves(valkeys: Valkeys) -> None:
    primary = valkeys.wait_whole()
    for server in valkeys.servers:
        # A server that stands still for a while does not answer in time.
        wait_until(lambda: server.run("alive") == 0, "it is alive")  # noqa: B023
        wait_until(lambda: server.run("ready") == 0, "it is ready")  # noqa: B023
    for sentinel in valkeys.sentinels:
        wait_until(lambda: sentinel.run("ready") == 0, "it is ready")  # noqa: B023
    for sentinel in valkeys.sentinels:
        sentinel.kill()
    primary.kill()
    assert primary.run("alive") != 0
    primary.start()
    wait_until(lambda: primary.run("alive") == 0, "it answers")
    # Nobody says who it is: it is alive, and neither serves nor takes writes.
    assert primary.run("ready") != 0

    def refusal() -> str:
        with primary.client("services") as client:
            try:
                client.set(f"{{{NAME}}}:run", "1")
            except ResponseError as error:
                return str(error)
        return "none"

    said = wait_until(refusal, "it answers")
    assert re.search(r"(?i)MASTERDOWN|READONLY|read only", said), said
