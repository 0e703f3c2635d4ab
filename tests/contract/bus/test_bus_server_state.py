"""A server's report on its memory and its persistence."""

from bus_flow import Flow, ask

from servicekit.bus import calls as c
from servicekit.bus import open_bus


def test_a_server_in_memory_has_no_bound_and_keeps_nothing(flow: Flow) -> None:
    state = flow.connection.call(c.ReadServerState())
    assert (state.max_bytes, state.persistence_ok) == (0, True)


def test_a_server_says_how_full_it_may_become_and_that_it_keeps_a_file(valkey_url: str) -> None:
    connection = open_bus(valkey_url, "state").connect()
    try:
        ask(valkey_url, "CONFIG", "SET", "maxmemory", "4gb")
        state = connection.call(c.ReadServerState())
        assert (state.max_bytes, state.persistence_ok) == (4 << 30, True)
        assert 0 < state.used_bytes < state.max_bytes
        before = ask(valkey_url, "CONFIG", "GET", "appendonly").endswith("yes")
        assert state.persists == before
    finally:
        ask(valkey_url, "CONFIG", "SET", "maxmemory", "0")
        connection.close()
