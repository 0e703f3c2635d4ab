"""What waits is counted, bounded and found when its time is over; the counts never drift."""

import itertools
import time
from dataclasses import dataclass

import pytest
from bus_flow import LONG_MS, Flow, id_of, ids, sid_of, submit
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from memory_bus import MemoryBus

from servicekit.bus import Bus, Connection, open_bus
from servicekit.bus import calls as c
from servicekit.bus import keys as k

LONG_AGO_NS = 10**9
IN_CENTURIES_NS = 10**19
_pools = itertools.count(1)


def _waiting(flow: Flow, tenant: str = "tenant") -> tuple[int, int, int, int]:
    found = flow.connection.call(c.CountWaiting(tenant))
    return found.num_requests, found.num_tokens, found.num_tenant_requests, found.num_tenant_tokens


def _start(flow: Flow, request_id: bytes, sid: bytes) -> None:
    assert flow.connection.call(c.Commit(sid, (), "w", b"plan", request_id))


def test_a_request_waits_until_a_plan_gives_it_a_slot(flow: Flow) -> None:
    sid = flow.session()
    flow.connection.call(submit(id_of(1), num_tokens=7))
    assert _waiting(flow) == (1, 7, 1, 7)
    (hint,) = flow.hints()
    flow.connection.call(c.Tokenized(id_of(1), hint.entry_id, b"meta", 1, num_tokens=11))
    assert _waiting(flow) == (1, 11, 1, 11)
    flow.connection.call(c.Claim(sid, 1, 0))
    assert _waiting(flow) == (1, 11, 1, 11)
    _start(flow, id_of(1), sid)
    assert _waiting(flow) == (0, 0, 0, 0)
    _start(flow, id_of(1), sid)  # sent again, or after a preemption
    assert _waiting(flow) == (0, 0, 0, 0)


def test_a_request_that_ends_waits_no_longer(flow: Flow) -> None:
    flow.ended()
    assert _waiting(flow) == (0, 0, 0, 0)
    flow.connection.execute([submit(id_of(11), "one", num_tokens=2), submit(id_of(12), "two", num_tokens=3)])
    assert _waiting(flow, "one") == (2, 5, 1, 2)
    flow.connection.call(c.Reject(id_of(11), b"", 0, b"row"))
    assert _waiting(flow, "one") == (1, 3, 0, 0)
    assert _waiting(flow, "two") == (1, 3, 1, 3)


def test_a_fenced_scheduler_starts_nothing(flow: Flow) -> None:
    request_id, sid = flow.running(flow.session()), sid_of(99)
    assert not flow.connection.call(c.Commit(sid, (), "w", b"plan", request_id))
    assert _waiting(flow)[0] == 1


@pytest.mark.parametrize(
    ("bounds", "of_tenant", "of_tokens"),
    [
        (c.Bounds(requests=2), False, False),
        (c.Bounds(tokens=11), False, True),
        (c.Bounds(tenant_requests=1), True, False),
        (c.Bounds(tenant_tokens=7), True, True),
    ],
)
def test_submit_is_refused_beyond_a_bound(flow: Flow, bounds: c.Bounds, of_tenant: bool, of_tokens: bool) -> None:
    flow.connection.execute([submit(id_of(1), num_tokens=4), submit(id_of(2), "other", num_tokens=4)])
    refused = submit(id_of(3), num_tokens=4, bounds=bounds)
    assert flow.connection.call(refused) == c.Overload(of_tenant, of_tokens, wait_ms=0)
    assert flow.connection.call(c.Fetch(id_of(3))) is None
    assert _waiting(flow) == (2, 8, 1, 4)
    assert flow.connection.call(submit(id_of(1), num_tokens=4, bounds=bounds)) is c.SubmitOutcome.EXISTS
    flow.connection.call(c.Reject(id_of(1), b"", 0, b"row"))
    assert flow.connection.call(refused) is c.SubmitOutcome.CREATED


def test_a_bound_of_one_tenant_is_nothing_to_another(flow: Flow) -> None:
    bounds = c.Bounds(tenant_requests=1, tenant_tokens=5)
    flow.connection.call(submit(id_of(1), "one", num_tokens=5))
    assert flow.connection.call(submit(id_of(2), "two", num_tokens=5, bounds=bounds)) is c.SubmitOutcome.CREATED


def test_a_prompt_beyond_the_bound_on_tokens_may_wait_alone(flow: Flow) -> None:
    bounds = c.Bounds(tokens=5)
    assert flow.connection.call(submit(id_of(1), num_tokens=9, bounds=bounds)) is c.SubmitOutcome.CREATED
    assert flow.connection.call(submit(id_of(2), num_tokens=1, bounds=bounds)) == c.Overload(False, True, 0)


def test_a_refusal_says_how_long_what_waits_will_take_to_start() -> None:
    clock = [1_000_000]
    bus = MemoryBus("pool", lambda: clock[0])
    flow = Flow(bus, bus.connect())
    sid = flow.session(ttl_ms=10 * LONG_MS)
    for number in range(20):
        flow.connection.call(submit(id_of(number)))
    for number in range(10):  # five a second
        clock[0] += 200
        _start(flow, id_of(number), sid)
    refusal = flow.connection.call(submit(id_of(50), bounds=c.Bounds(requests=10)))
    assert refusal == c.Overload(False, False, wait_ms=2000)
    clock[0] += 2000  # nothing has started for a while
    refusal = flow.connection.call(submit(id_of(50), bounds=c.Bounds(tenant_requests=10)))
    assert refusal == c.Overload(True, False, wait_ms=4000)


def test_a_count_says_how_long_what_waits_will_take_to_start() -> None:
    clock = [1_000_000]
    bus = MemoryBus("pool", lambda: clock[0])
    flow = Flow(bus, bus.connect())
    sid = flow.session(ttl_ms=10 * LONG_MS)
    assert flow.connection.call(c.CountWaiting()).expected_wait_ms == 0, "nothing waits"
    for number in range(20):
        flow.connection.call(submit(id_of(number)))
    clock[0] += 7000
    assert flow.connection.call(c.CountWaiting()).expected_wait_ms == 7000, "nothing starts: no worker is there"
    for number in range(10):
        _start(flow, id_of(number), sid)
    assert flow.connection.call(c.CountWaiting()).expected_wait_ms == 7000, "ten of twenty in seven seconds"


def test_what_waits_and_does_not_start_is_expected_to_wait_ever_longer(flow: Flow) -> None:
    flow.connection.call(submit(id_of(1)))
    waits_ms = [flow.connection.call(c.CountWaiting()).expected_wait_ms]
    deadline_s = time.monotonic() + 60
    while len(waits_ms) < 3 and time.monotonic() < deadline_s:
        if (wait_ms := flow.connection.call(c.CountWaiting()).expected_wait_ms) > waits_ms[-1]:
            waits_ms.append(wait_ms)
    assert len(waits_ms) == 3
    flow.connection.call(c.Cancel(id_of(1), 1, 0))
    flow.connection.execute([c.Reject(id_of(1), b"", 0, b"")])
    assert flow.connection.call(c.CountWaiting()).expected_wait_ms == 0


def test_the_rate_of_late_counts_more_than_the_one_of_long_ago() -> None:
    clock = [0]
    bus = MemoryBus("pool", lambda: clock[0])
    flow = Flow(bus, bus.connect())
    sid = flow.session(ttl_ms=1000 * LONG_MS)
    for number in range(250):
        flow.connection.call(submit(id_of(number)))
    for number in range(100):  # ten a second
        clock[0] += 100
        _start(flow, id_of(number), sid)
    for number in range(100, 200):  # now one a second
        clock[0] += 1000
        _start(flow, id_of(number), sid)
    refusal = flow.connection.call(submit(id_of(251), bounds=c.Bounds(requests=1)))
    assert isinstance(refusal, c.Overload)
    assert 45_000 <= refusal.wait_ms <= 55_000


def test_what_is_late_is_found_wherever_it_waits(flow: Flow) -> None:
    flow.connection.execute(
        [
            submit(id_of(1), deadline_ns=LONG_AGO_NS + 10**6),
            submit(id_of(2), deadline_ns=LONG_AGO_NS),
            submit(id_of(3), deadline_ns=IN_CENTURIES_NS),
            submit(id_of(4)),
        ]
    )
    for hint in flow.hints()[1:]:  # the first one stays in state PROMPT
        flow.connection.call(c.Tokenized(hint.fields[k.REQUEST], hint.entry_id, b"meta", 1))
    late = flow.connection.call(c.Overdue(10))
    assert [(each.request_id, each.state.value) for each in late] == [(id_of(2), "READY"), (id_of(1), "PROMPT")]
    assert ids(flow.connection.call(c.Overdue(1))) == [id_of(2)]
    flow.connection.execute([c.Reject(id_of(2), b"", 0, b"row"), c.Reject(id_of(1), b"", 0, b"row")])
    assert flow.connection.call(c.Overdue(10)) == []


def test_what_is_cancelled_while_it_waits_is_late_at_once(flow: Flow) -> None:
    flow.connection.call(c.Cancel(id_of(1), 1, 1))  # comes before its request
    flow.connection.execute([submit(id_of(1)), submit(id_of(2)), submit(id_of(3), deadline_ns=IN_CENTURIES_NS)])
    flow.connection.execute([c.Cancel(id_of(3), 1, 1), c.Cancel(id_of(2), 1, 1, sequence=0)])
    assert {each.request_id: each.cancel_reason for each in flow.connection.call(c.Overdue(10))} == {
        id_of(1): 1,
        id_of(3): 1,
    }


def test_what_a_scheduler_has_is_its_own_to_end(flow: Flow) -> None:
    sid = flow.session()
    flow.connection.call(submit(id_of(1), deadline_ns=LONG_AGO_NS))
    (hint,) = flow.hints()
    flow.connection.execute([c.Tokenized(id_of(1), hint.entry_id, b"meta", 1), c.Claim(sid, 1, 0)])
    assert flow.connection.call(c.Cancel(id_of(1), 1, 1))
    assert flow.connection.call(c.Overdue(10)) == []


# --- the counts never drift -------------------------------------------------------------------------------------------

NUMBERS = st.integers(0, 4)


@dataclass
class _Known:
    """A request as it should be counted."""

    tenant: str
    tokens: int
    state: str = "PROMPT"
    waits: bool = True
    is_due: bool = False


class _Counting(RuleBasedStateMachine):
    """Everything that may happen to five requests of two tenants, in any order, and again."""

    bus: Bus

    def __init__(self) -> None:
        super().__init__()
        self.connection: Connection = self.bus.connect()
        self.known: dict[int, _Known] = {}
        self.marked: set[int] = set()  # cancelled before they came

    @initialize()
    def begin(self) -> None:
        for sid in (sid_of(1), sid_of(2)):
            self.connection.call(c.Hello(sid, c.SessionKind.SCHEDULER, "s", "", LONG_MS))
        assert self.connection.call(c.LeaseShard(sid_of(2), 0))

    @rule(number=NUMBERS, tenant=st.sampled_from(["one", "two"]), tokens=st.integers(0, 9), is_late=st.booleans())
    def submit(self, number: int, tenant: str, tokens: int, is_late: bool) -> None:
        answer = self.connection.call(
            submit(id_of(number), tenant, num_tokens=tokens, deadline_ns=LONG_AGO_NS if is_late else 0)
        )
        if number not in self.known:
            assert answer is c.SubmitOutcome.CREATED
            self.known[number] = _Known(tenant, tokens, is_due=is_late or number in self.marked)

    @rule(number=NUMBERS, tokens=st.integers(0, 9))
    def tokenized(self, number: int, tokens: int) -> None:
        done = self.connection.call(c.Tokenized(id_of(number), b"", b"meta", 1, tokens))
        request = self.known.get(number)
        assert done == (request is not None and request.state == "PROMPT")
        if done and request:
            request.state, request.tokens = "READY", tokens

    @rule(number=NUMBERS)
    def reject(self, number: int) -> None:
        if self.connection.call(c.Reject(id_of(number), b"", 0, b"row")):
            self.known[number].state, self.known[number].waits = "RUNNING", False

    @rule(count=st.integers(1, 2))
    def claim(self, count: int) -> None:
        for stored in self.connection.call(c.Claim(sid_of(1), count, 0)) or ():
            self.known[stored.request_id[1]].state = "RUNNING"

    @rule(numbers=st.lists(NUMBERS, max_size=3))
    def commit(self, numbers: list[int]) -> None:
        assert self.connection.call(c.Commit(sid_of(1), (), "w", b"plan", b"".join(map(id_of, numbers))))
        for number in numbers:
            if number in self.known:
                self.known[number].waits = False

    @rule(number=NUMBERS)
    def cancel(self, number: int) -> None:
        if self.connection.call(c.Cancel(id_of(number), 1, 1)):
            self.known[number].is_due = True
        else:
            self.marked.add(number)

    @rule(number=NUMBERS)
    def retire(self, number: int) -> None:
        if self.connection.call(c.Retire(sid_of(2), 0, id_of(number), b"result", LONG_MS)):
            self.known[number].state, self.known[number].waits = "ENDED", False

    @invariant()
    def counts_are_right(self) -> None:
        for tenant in ("one", "two"):
            waiting = [each for each in self.known.values() if each.waits]
            own = [each for each in waiting if each.tenant == tenant]
            assert self.connection.call(c.CountWaiting(tenant)) == c.Waiting(
                len(waiting), sum(each.tokens for each in waiting), len(own), sum(each.tokens for each in own)
            )

    @invariant()
    def late_ones_are_found(self) -> None:
        late = {each.request_id[1] for each in self.connection.call(c.Overdue(100))}
        for number, each in self.known.items():
            if each.waits and each.state in ("PROMPT", "READY"):
                assert (number in late) == each.is_due
            else:
                assert number not in late

    def teardown(self) -> None:
        for number in self.known:
            self.connection.execute(
                [
                    c.Reject(id_of(number), b"", 0, b"row"),
                    c.Retire(sid_of(2), 0, id_of(number), b"result", LONG_MS),
                ]
            )
        for tenant in ("one", "two"):
            assert self.connection.call(c.CountWaiting(tenant)) == c.Waiting(0, 0, 0, 0)
        self.connection.close()


@pytest.mark.parametrize("kind", ["memory", "valkey", "redis"])
def test_counts_never_drift(kind: str, request: pytest.FixtureRequest) -> None:
    url = None if kind == "memory" else request.getfixturevalue(f"{kind}_url")

    class Machine(_Counting):
        def __init__(self) -> None:
            pool = f"waiting-{next(_pools)}"
            self.bus = MemoryBus(pool) if url is None else open_bus(url, pool)
            super().__init__()

    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=100, stateful_step_count=40, suppress_health_check=list(HealthCheck)),
    )
