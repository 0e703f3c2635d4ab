"""The shards that a detokenizer has leased, confirms, gives back and tries for."""

from tokenizers_under_test import byte_level

from detokenizer_svc.core.detokenizer import Detokenizer
from detokenizer_svc.shard import Shard
from detokenizer_svc.shards import LeasedShards
from servicekit.bus.calls import LeaseShard, ReleaseShard, SessionInfo, SessionKind
from servicekit.bus.keys import Keys

NAMES, SID = Keys("pool"), b"\x00" * 16


def leased(*numbers: int, num_detokenizers: int = 1) -> LeasedShards:
    shards, detokenizer = LeasedShards(4), Detokenizer(byte_level())
    for number in numbers:
        shards.add(Shard(number, NAMES, detokenizer.sibling()))
    sids = (SID, *(bytes([each]) * 16 for each in range(1, num_detokenizers)))
    shards.note([SessionInfo(sid, SessionKind.DETOKENIZER, "d", "", True, 0, b"") for sid in sids], SID)
    return shards


def numbers(shards: list[Shard]) -> list[int]:
    return [shard.number for shard in shards]


def test_leases_are_renewed_and_what_is_not_served_is_let_go() -> None:
    shards = leased(2, 0)
    shards.unsure |= {3, 1}
    calls = shards.confirmations(SID)
    assert calls[:2] == [LeaseShard(SID, 2, held=True), LeaseShard(SID, 0, held=True)]
    assert calls[2:] == [ReleaseShard(SID, 1), ReleaseShard(SID, 3)]
    assert numbers(shards.confirm([False, True, None, None, "survey"])) == [2]
    assert shards.unsure == set()


def test_shards_are_tried_for_until_there_are_enough() -> None:
    shards = leased(0, num_detokenizers=2)
    tried = []
    for number in shards.wanted(SID):
        tried.append(number)
        if number != 1:  # another one has it
            shards.add(Shard(number, NAMES, Detokenizer(byte_level())))
    assert tried == [1, 2]
    assert shards.has_successor


def test_shards_beyond_the_share_are_given_back() -> None:
    assert numbers(leased(0, 3, 1, num_detokenizers=2).surplus()) == [3]
    assert leased(0, 3, 1, 2).surplus() == []
    assert not leased().has_successor


def test_logs_and_attachments_of_all_shards_are_read() -> None:
    shards = leased(0, 1)
    for shard in shards:
        shard.log_position = b"%d-0" % shard.number
    expected = {NAMES.tokens(0): b"0-0", NAMES.attach(0): b"0-0", NAMES.tokens(1): b"1-0", NAMES.attach(1): b"0-0"}
    assert shards.positions() == expected
    shards.drop(next(iter(shards)))
    assert shards.positions().keys() == {NAMES.tokens(1), NAMES.attach(1)}
