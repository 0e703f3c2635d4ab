"""What is kept of a log: no more than live requests need, and no more than the limits allow."""

from detokenizer_svc.core.extent import Compaction, LogExtent, LogLimits, LogMark

LIMITS = LogLimits(num_entries=4, num_bytes=1000)
ONE, TWO = b"1" * 16, b"2" * 16


def _read(extent: LogExtent, *numbers: int, num_bytes: int = 10) -> None:
    for number in numbers:
        extent.read(b"%d-0" % number, num_bytes)


def test_nothing_is_done_about_a_log_that_is_needed_and_short() -> None:
    extent = LogExtent()
    assert extent.compaction(LIMITS) is None
    _read(extent, 1)
    extent.open(ONE)
    _read(extent, 2, 3, 4)
    assert not extent.is_long(LIMITS)
    assert extent.compaction(LIMITS) is None
    assert (extent.num_entries, extent.num_bytes) == (4, 40)


def test_what_nobody_needs_is_dropped_without_checkpoints() -> None:
    extent = LogExtent()
    _read(extent, 1)
    extent.open(ONE)
    _read(extent, 2, 3)
    extent.open(TWO)
    extent.close(ONE)
    compaction = extent.compaction(LIMITS)
    assert compaction == Compaction(LogMark(b"3-0", 2, 20))
    extent.compacted(compaction, 0)
    assert extent.compaction(LIMITS) is None
    assert (extent.num_entries, extent.num_bytes) == (1, 10)


def test_a_log_that_nobody_needs_is_dropped_to_its_last_entry() -> None:
    extent = LogExtent()
    extent.read(b"5-7", 10)
    extent.open(ONE)
    extent.close(ONE)
    compaction = extent.compaction(LIMITS)
    assert compaction == Compaction(LogMark(b"5-8", 1, 10))
    extent.compacted(compaction, 0)
    assert extent.num_entries == 0
    extent.read(b"6-0", 10)
    extent.open(ONE)
    assert extent.compaction(LIMITS) is None, "there is nothing before the opening"


def test_a_log_with_too_many_entries_is_replaced_by_checkpoints_of_all_that_live() -> None:
    extent = LogExtent()
    _read(extent, 1)
    extent.open(ONE)
    _read(extent, 2)
    extent.open(TWO)
    _read(extent, 3, 4)
    assert not extent.is_long(LIMITS)
    _read(extent, 5)
    assert extent.is_long(LIMITS)
    compaction = extent.compaction(LIMITS)
    assert compaction == Compaction(LogMark(b"5-1", 5, 50), (ONE, TWO))
    extent.compacted(compaction, 20)
    assert not extent.is_long(LIMITS)
    assert extent.num_entries == 0
    _read(extent, 6)
    assert extent.compaction(LIMITS) is None, "both need what came behind their checkpoints"
    extent.close(ONE)
    extent.close(TWO)
    assert extent.compaction(LIMITS) == Compaction(LogMark(b"6-1", 6, 60))


def test_a_log_with_too_many_bytes_is_compacted_too() -> None:
    extent = LogExtent()
    _read(extent, 1)
    extent.open(ONE)
    _read(extent, 2, num_bytes=991)
    assert extent.is_long(LIMITS)


def test_entries_that_nobody_needs_make_a_log_no_longer() -> None:
    extent = LogExtent()
    _read(extent, *range(1, 100))
    extent.open(ONE)
    assert not extent.is_long(LIMITS)
    assert extent.compaction(LIMITS) == Compaction(LogMark(b"99-0", 98, 980))


def test_a_request_with_a_checkpoint_needs_all_of_the_log() -> None:
    extent = LogExtent()
    extent.restore(ONE)
    _read(extent, 8, 9)
    extent.open(TWO)
    extent.close(TWO)
    assert extent.compaction(LIMITS) is None
    _read(extent, 10, 11, 12)
    assert extent.compaction(LIMITS) == Compaction(LogMark(b"12-1", 5, 50), (ONE,))


def test_checkpoints_cost_at_most_four_bytes_for_each_that_is_dropped() -> None:
    extent = LogExtent()
    _read(extent, 1)
    extent.open(ONE)
    written = 0
    for number in range(2, 1000):
        _read(extent, number)
        if extent.is_long(LIMITS) and (compaction := extent.compaction(LIMITS)):
            size = 5 * number  # one long request, half of whose log is its tokens
            written += size
            extent.compacted(compaction, size)
            assert extent.num_entries == 0
        assert extent.num_bytes <= max(10 * (LIMITS.num_entries + 1), 10 + 5 * number / 4)
    assert 0 < written <= 4 * 10 * 1000 + 5 * 1000
