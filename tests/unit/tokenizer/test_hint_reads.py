"""The reads by which a tokenizer gets its hints, and what they bring."""

from servicekit.bus import keys as k
from servicekit.bus.calls import Entry, Read, ReadGroup, SessionInfo, SessionKind
from servicekit.bus.keys import Keys
from tokenizer_svc.hints import READ_BLOCK_MS, HintReader

NAMES = Keys("pool")


def reader(stay_awake_s: float = 0.0) -> HintReader:
    """One that has looked for all that it may have been given before."""
    made = HintReader(NAMES, "t1", 60.0, stay_awake_s)
    made.take([[] for _ in made.reads(may_wait=True, is_idle=True)], ())
    return made


def hint(number: int) -> Entry:
    return Entry(b"%d-0" % number, {k.REQUEST: bytes([number]) * 16})


def tokenizer(sid: bytes, name: str, *, alive: bool = True) -> SessionInfo:
    return SessionInfo(sid, SessionKind.TOKENIZER, name, "", alive, 0, b"")


def names_asked_for(hints: HintReader) -> list[bytes]:
    """Whose pending hints the next reads ask for; these wait for nothing then."""
    reads = [each for each in hints.reads(may_wait=True, is_idle=True) if isinstance(each, ReadGroup)]
    pending = [each.consumer for each in reads if each.pending]
    assert reads[-1].block_ms == (0 if pending else READ_BLOCK_MS)
    return pending


def test_the_first_read_asks_for_what_its_name_was_given_before() -> None:
    assert names_asked_for(HintReader(NAMES, "t1", 60.0, 0.0)) == [b"t1"]
    again = reader()
    assert names_asked_for(again) == []
    again.read_own()
    assert [names_asked_for(again) for _ in range(2)] == [[b"t1"], []]


def test_one_of_the_living_asks_for_what_the_dead_were_given() -> None:
    sessions = [
        *(tokenizer(b"a", "t1"), tokenizer(b"b", "t2"), tokenizer(b"c", "t3", alive=False)),
        *(tokenizer(b"d", "t2", alive=False), SessionInfo(b"0", SessionKind.GATEWAY, "g", "", True, 0, b"")),
    ]
    first, second = reader(), reader()
    first.take_over(sessions, b"a")
    second.take_over(sessions, b"b")
    assert (names_asked_for(first), names_asked_for(second)) == ([b"t3"], [])


def test_who_has_something_to_do_waits_for_no_hint() -> None:
    (read,) = reader().reads(may_wait=False, is_idle=True)
    assert isinstance(read, ReadGroup)
    assert read.block_ms == 0


def test_a_listening_reader_waits_beside_the_group_and_then_asks_it() -> None:
    hints = reader(1.0)
    group, both = hints.reads(may_wait=True, is_idle=True)
    assert isinstance(group, ReadGroup)
    assert isinstance(both, Read)
    assert (group.block_ms, both.block_ms) == (0, READ_BLOCK_MS)
    assert both.streams.keys() == {NAMES.prompts, NAMES.bell}
    assert hints.take([[], {NAMES.prompts: [hint(1)]}], ()).all == []
    group, *_ = hints.reads(may_wait=True, is_idle=True)
    assert isinstance(group, ReadGroup)
    assert group.block_ms == 0, "the prompt that was seen is there"
    assert hints.take([[hint(1)]], ()).all == [hint(1)]


def test_who_had_a_hint_waits_for_no_ring_until_the_next_hint_is_no_longer_expected() -> None:
    now_s = [100.0]
    hints = HintReader(NAMES, "t1", 60.0, 0.5, lambda: now_s[0])
    hints.take([[] for _ in hints.reads(may_wait=True, is_idle=True)], ())
    _, both = hints.reads(may_wait=True, is_idle=True)
    assert isinstance(both, Read), "nothing came so far: the doorbell may ring"
    hints.take([[hint(1)], {}], ())
    for later_s, block_ms in ((0.0, READ_BLOCK_MS), (0.375, 125), (0.4375, 63)):
        now_s[0] = 100.0 + later_s
        bell, group = hints.reads(may_wait=True, is_idle=True)
        assert isinstance(bell, Read)
        assert (bell.streams.keys(), bell.block_ms) == ({NAMES.bell}, 0)
        assert isinstance(group, ReadGroup)
        assert group.block_ms == block_ms
        hints.take([{}, []], ())
    now_s[0] = 100.5
    _, both = hints.reads(may_wait=True, is_idle=True)
    assert isinstance(both, Read)


def test_who_had_a_hint_hears_a_ring_with_the_next_and_stays_awake() -> None:
    now_s = [100.0]
    hints = HintReader(NAMES, "t1", 60.0, 0.5, lambda: now_s[0])
    hints.take([[] for _ in hints.reads(may_wait=True, is_idle=True)], ())
    was_awake = True
    for number in range(1, 30):
        now_s[0] += 0.25
        rings = {NAMES.bell: [Entry(b"%d-0" % number, {k.SENT_NS: b"1"})]}
        reads = hints.reads(may_wait=True, is_idle=True)
        listens = [isinstance(each, Read) for each in reads]
        (group,) = (each for each in reads if isinstance(each, ReadGroup))
        assert group.awake_s > 0 or any(listens), "who is not awake hears who has rung"
        assert group.awake_s > 0 or was_awake, "who has heard it is awake"
        was_awake = group.awake_s > 0
        answers = [rings if each else [hint(number)] for each in listens]
        assert hints.take(answers, ()).all == [hint(number)]


def test_hints_come_once_without_those_that_are_worked_on() -> None:
    hints = reader().take([[hint(1), hint(2)], [hint(2), hint(3)], [hint(4)]], [hint(3).entry_id])
    assert hints.all == [hint(1), hint(2), hint(4)]
    assert hints.left_behind == [hint(1), hint(2)]


def test_a_turn_without_reads_brings_no_hints() -> None:
    assert reader().take([], ()) == ([], [])
