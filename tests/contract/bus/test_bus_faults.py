"""What a server, or the way to it, may do wrong without ending a process: everybody waits, says so, and comes back."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from bus_flow import LONG_MS, ask, id_of, submit
from faulty_servers import Proxy, running, until

from contract.domain.errors import Fault, PenstockError
from servicekit import reminder
from servicekit import session as sessions
from servicekit.bus import BusUnavailable, open_bus, redis_handshake
from servicekit.bus.calls import Append, Commit, Hello, Length, ListSessions, Renew, SessionKind, SubmitOutcome
from servicekit.bus.embedded import EmbeddedServer, find_server
from servicekit.bus.redis_address import RedisAddress
from servicekit.bus.redis_handshake import bus_error
from servicekit.session import Recovery, Session


@pytest.fixture(params=["valkey", "redis"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedServer]:
    program = find_server() if request.param == "valkey" else request.getfixturevalue("redis_program")
    own = EmbeddedServer(tmp_path / "data", server=program, port=0)
    own.start()
    yield own
    own.close()


class Background:
    """A session that connects or recovers in a thread, as a service's loop does."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.recovery: Recovery | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._is_first = True

    def start(self, *, is_first: bool) -> None:
        self._is_first = is_first
        self._thread.start()

    def join(self) -> None:
        self._thread.join(300)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            if self._is_first:
                self.session.connect()
            else:
                self.recovery = self.session.recover()
        except Exception as error:  # noqa: BLE001  (the test raises it)
            self.error = error


def _session(url: str) -> Session:
    return Session(open_bus(url), SessionKind.SCHEDULER, "s", ttl_ms=LONG_MS)


def test_a_wrong_password_at_the_start_is_waited_for(server: EmbeddedServer, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("wrong")
    ask(server.url, "CONFIG", "SET", "requirepass", "right")
    with structlog.testing.capture_logs() as logs:
        life = Background(_session(f"{server.url}?password_file={secret}"))
        life.session._reminder = reminder.Reminder(600.0)  # the next time does not come within the test
        life.start(is_first=True)
        until(lambda: any("WRONGPASS" in str(line.get("reason")) for line in logs), "the reason to be told")
        assert life.session.waited_ns
        with pytest.raises(BusUnavailable):
            _ = life.session.connection.call(ListSessions())
        secret.write_text("right\n")
        life.join()
    assert len([line for line in logs if line["event"] == "waiting for the bus"]) == 1, "once in a period"
    assert life.session.connection.call(Commit(life.session.sid, ((0, b"row"),)))
    life.session.leave()


def test_what_lasts_is_told_once_in_ten_seconds() -> None:
    told = reminder.Reminder()
    assert [told.is_due(now_s) for now_s in (5.0, 6.0, 14.9, 15.0, 15.1, 99.0)] == [
        True,
        False,
        False,
        True,
        False,
        True,
    ]


def test_a_password_may_be_rotated_while_a_process_runs(server: EmbeddedServer, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("first")
    ask(server.url, "ACL", "SETUSER", "me", "on", ">first", "~*", "+@all")
    session = _session(f"{server.url.replace('://', '://me@')}?password_file={secret}")
    session.connect()
    ask(server.url, "ACL", "SETUSER", "me", "resetpass", ">second")
    ask(server.url, "CLIENT", "KILL", "USER", "me")
    with pytest.raises(BusUnavailable):
        session.connection.call(ListSessions())
    life = Background(session)
    life.start(is_first=False)
    with pytest.raises(BusUnavailable, match="refuses the login"):
        open_bus(f"{server.url.replace('://', '://me@')}?password_file={secret}").connect()
    secret.write_text("second")
    life.join()
    assert life.recovery == Recovery(lost=False, new_run=False)
    session.leave()


def test_rights_that_were_taken_away_are_waited_for(server: EmbeddedServer) -> None:
    ask(server.url, "ACL", "SETUSER", "me", "on", ">pass", "~*", "+@all")
    connection = open_bus(server.url.replace("://", "://me:pass@")).connect()
    ask(server.url, "ACL", "SETUSER", "me", "-xadd", "-hset")
    for call in (Append(b"s", {b"n": b"1"}), Hello(id_of(1), SessionKind.WORKER, "w", "", LONG_MS)):
        with pytest.raises(BusUnavailable, match="permits this user too little"):
            connection.call(call)
    ask(server.url, "ACL", "SETUSER", "me", "+xadd", "+hset")
    assert connection.call(Append(b"s", {b"n": b"1"}))
    connection.close()


def test_a_server_with_too_many_clients_is_waited_for(server: EmbeddedServer) -> None:
    guests = [open_bus(server.url).connect() for _ in range(3)]
    ask(server.url, "CONFIG", "SET", "maxclients", "3")
    life = Background(_session(server.url))
    with pytest.raises(BusUnavailable, match=r"raise its maxclients|reset|closed"):
        open_bus(server.url).connect()
    life.start(is_first=True)
    for guest in guests:
        guest.close()
    life.join()
    life.session.leave()


def test_functions_that_were_flushed_are_loaded_again(server: EmbeddedServer) -> None:
    session = _session(server.url)
    session.connect()
    bus = open_bus(server.url)
    flushed = bus.connect()
    ask(server.url, "FUNCTION", "FLUSH")
    with pytest.raises(BusUnavailable, match="loaded again"):
        session.connection.call(ListSessions())
    assert session.recover() == Recovery(lost=False, new_run=False)
    assert session.connection.call(Commit(session.sid, ((0, b"row"),)))
    assert flushed.call(Length(bus.keys.tokens(0))) == 1
    flushed.close()
    session.leave()


def test_what_can_never_work_is_told_at_once() -> None:
    address = RedisAddress("h")
    for text in ("ERR unknown command 'FUNCTION'", "ERR DB index is out of range", "CROSSSLOT keys", "ERR Lua: nil"):
        assert isinstance(bus_error(address, Exception(text)), PenstockError)
    for text in ("MOVED 7 h:1", "LOADING it", "READONLY You", "NOAUTH a", "ERR max number of clients reached"):
        assert isinstance(bus_error(address, Exception(text)), BusUnavailable)


def test_a_database_that_is_not_there_ends_the_start(server: EmbeddedServer) -> None:
    with pytest.raises(PenstockError, match="DB index"):
        _session(f"{server.url}/99").connect()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_may_drop_keys_is_refused_at_the_start_and_waited_for_later(
    server: EmbeddedServer, policy: str
) -> None:
    session = _session(server.url)
    session.connect()
    ask(server.url, "CONFIG", "SET", "maxmemory-policy", policy)
    with pytest.raises(PenstockError, match=f"maxmemory-policy is {policy}: set it to noeviction") as refused:
        _session(server.url).connect()
    assert refused.value.fault is Fault.OPERATOR
    assert session.connection.call(Renew(session.sid, LONG_MS))
    with structlog.testing.capture_logs() as logs:
        life = Background(session)
        life.start(is_first=False)
        until(lambda: any(policy in str(line.get("reason")) for line in logs), "the reason to be told")
        ask(server.url, "CONFIG", "SET", "maxmemory-policy", "noeviction")
        life.join()
    assert life.recovery == Recovery(lost=False, new_run=False)
    session.leave()


def test_the_server_that_comes_along_does_not_rewrite_its_file_all_the_time(server: EmbeddedServer) -> None:
    assert ask(server.url, "CONFIG", "GET", "auto-aof-rewrite-min-size").split()[1] == str(4 << 30)
    assert ask(server.url, "CONFIG", "GET", "no-appendfsync-on-rewrite").split()[1] == "yes"


def test_waiting_for_a_silent_server_is_told_from_hanging(server: EmbeddedServer) -> None:
    proxy = Proxy(int(server.url.rpartition(":")[2]))
    session = _session(proxy.url)
    session.connect()
    connection = session.connection
    proxy.go_silent()
    seen: list[int] = []

    def look() -> None:
        until(lambda: connection._is_exchanging, "the call to wait")  # type: ignore[attr-defined]
        first = session.waited_ns
        until(lambda: session.waited_ns > first, "time to pass")
        seen.append(first)
        proxy.hang_up()  # else the call would go on waiting

    watcher = threading.Thread(target=look)
    watcher.start()
    with pytest.raises(BusUnavailable):
        connection.call(ListSessions())
    watcher.join()
    ended_ns = session.waited_ns
    assert seen
    assert ended_ns > seen[0]
    assert session.waited_ns == ended_ns, "whoever does not wait any more, and does nothing else, hangs"
    assert session.recover() == Recovery(lost=False, new_run=False)
    session.leave()
    proxy.close()


def test_a_half_open_connection_is_left_before_its_session_counts_as_stuck() -> None:
    assert redis_handshake.PATIENCE_S < sessions.PATIENCE_S


def test_who_is_lost_again_at_once_rests_before_it_comes_back(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_SOON_S", 600.0)
    session = _session(server.url)
    session.connect()
    rests: list[float] = []
    session._stop.wait = rests.append  # type: ignore[assignment,method-assign]
    session.recover(BusUnavailable("the first"))
    session.recover(BusUnavailable("the second"))
    assert len(rests) == 2
    session._reached_s -= sessions._SOON_S
    session.recover(BusUnavailable("much later"))
    assert len(rests) == 2
    session.leave()


def _has_role(role: str, port: int) -> bool:
    """A sentinel that gives a server another role closes every client's connection to it, this one's too."""
    try:
        return f"role:{role}" in ask(f"redis://127.0.0.1:{port}", "INFO", "replication")
    except ConnectionError:
        return False


def test_the_primary_that_sentinels_know_is_followed(tmp_path: Path, redis_program: Path) -> None:
    with (
        running(tmp_path / "one", program=redis_program) as first,
        running(tmp_path / "two", "--replicaof", f"127.0.0.1 {first}", program=redis_program) as second,
        running(
            tmp_path / "sentinel",
            *("--sentinel", f"sentinel monitor pool 127.0.0.1 {first} 1"),
            *("sentinel down-after-milliseconds pool 60000", "sentinel failover-timeout pool 60000"),
            program=redis_program,
        ) as sentinel,
    ):
        sentinel_url = f"redis://127.0.0.1:{sentinel}"
        url = f"sentinel://127.0.0.1:1,127.0.0.1:{sentinel}/pool"
        until(lambda: "num-slaves 1" in ask(sentinel_url, "SENTINEL", "MASTER", "pool"), "the sentinel to know both")
        until(lambda: "master_link_status:up" in ask(f"redis://127.0.0.1:{second}", "INFO"), "the replica")
        session = _session(url)
        session.connect()
        assert session.connection.call(submit(id_of(1))) is SubmitOutcome.CREATED
        until(lambda: "master_repl_offset:0" not in ask(f"redis://127.0.0.1:{second}", "INFO"), "the replica to follow")
        # As long as the sentinel has not asked the replica for its state, it has none that is good enough.
        until(lambda: ask(sentinel_url, "SENTINEL", "FAILOVER", "pool") == "OK", "a failover to begin")
        until(lambda: _has_role("master", second), "the replica to be promoted")
        until(lambda: _has_role("slave", first), "the primary to be demoted")
        with pytest.raises(BusUnavailable):
            session.connection.call(submit(id_of(2)))
        session.recover()
        assert session.connection.call(submit(id_of(2))) is SubmitOutcome.CREATED
        assert ask(f"redis://127.0.0.1:{second}", "EXISTS", f"{{penstock}}:req:{id_of(2).hex()}") == "1"
        session.leave()
        with pytest.raises(BusUnavailable, match="know no primary 'other'"):
            open_bus(f"sentinel://127.0.0.1:{sentinel}/other").connect()


def test_the_node_of_a_cluster_that_holds_the_pool_is_found(tmp_path: Path, redis_program: Path) -> None:
    options = ("--cluster-enabled", "yes")
    with (
        running(tmp_path / "one", *options, program=redis_program) as first,
        running(tmp_path / "two", *options, program=redis_program) as second,
    ):
        one, two = f"redis://127.0.0.1:{first}", f"redis://127.0.0.1:{second}"
        slot = int(ask(one, "CLUSTER", "KEYSLOT", "{penstock}:run"))
        others = [part for part in ((0, slot - 1), (slot + 1, 16383)) if part[0] <= part[1]]
        for low, high in others:
            ask(one, "CLUSTER", "ADDSLOTSRANGE", str(low), str(high))
        ask(two, "CLUSTER", "ADDSLOTS", str(slot))
        ask(one, "CLUSTER", "MEET", "127.0.0.1", str(second), ask(two, "CONFIG", "GET", "cluster-port").split()[1])
        for each in (one, two):
            until(lambda each=each: "cluster_state:ok" in ask(each, "CLUSTER", "INFO"), "the cluster")
        session = _session(one)
        session.connect()
        assert session.connection.call(submit(id_of(1))) is SubmitOutcome.CREATED
        assert ask(two, "EXISTS", f"{{penstock}}:req:{id_of(1).hex()}") == "1"
        session.leave()
