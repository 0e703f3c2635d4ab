"""Streams in groups of tokens: nothing is lost, groups are alike wherever a stream goes on, and the end never waits."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from contract.domain import chain
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.finish import FinishReason, Usage
from contract.domain.rows import TextRow
from gateway_svc.core.streams import merge
from gateway_svc.grouping import GroupingSink


class Kept:
    """A sink that keeps what it is told."""

    has_room = True

    def __init__(self) -> None:
        self.rows: list[TextRow] = []
        self.chains: list[int] = []
        self.error: PenstockError | None = None

    def learn(self, prompt: int, num_prompt_tokens: int) -> None:
        raise AssertionError

    def learn_model(self, prompt: int, model_digest: bytes) -> None:
        raise AssertionError

    def take(self, prompt: int, row: TextRow, chain: int) -> None:
        self.rows.append(row)
        self.chains.append(chain)

    def end(self, usages: Sequence[Usage]) -> None:
        raise AssertionError

    def fail(self, error: PenstockError) -> None:
        self.error = error


def rows_of(counts: Sequence[int], *, first: int = 0, ends: bool = True) -> list[TextRow]:
    """Rows of so many tokens each, of a sample that has `first` tokens already."""
    made, known = [], chain.CHAIN_START
    for token in range(first):
        known = chain.extend(known, (token,))
    for count in counts:
        ids = tuple(range(first, first + count))
        made.append(TextRow(b"r" * 16, 0, first, first, known, ids, "x" * count))
        known, first = chain.extend(known, ids), first + count
    if ends and made:
        made[-1].finish = FinishReason.STOP
    return made


def told(rows: Sequence[TextRow], interval: int) -> Kept:
    kept = Kept()
    sink = GroupingSink(kept, interval)
    for row in rows:
        sink.take(0, row, chain.extend(row.chain, row.token_ids))
    return kept


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(2, 9))
def test_all_is_told_in_order_and_each_group_extends_the_one_before(counts: list[int], interval: int) -> None:
    rows = rows_of(counts)
    kept = told(rows, interval)
    whole, again = merge(rows), merge(kept.rows)
    assert (whole.token_ids, whole.text, whole.finish) == (again.token_ids, again.text, again.finish)
    assert kept.chains == [chain.extend(row.chain, row.token_ids) for row in kept.rows]


@given(st.integers(1, 60), st.integers(2, 9), st.integers(0, 59))
def test_groups_end_alike_wherever_a_stream_goes_on(num_tokens: int, interval: int, first: int) -> None:
    def ends(kept: Kept) -> list[int]:
        return [row.token_offset + len(row.token_ids) for row in kept.rows]

    first = min(first, num_tokens - 1)
    whole = ends(told(rows_of([1] * num_tokens), interval))
    rest = ends(told(rows_of([1] * (num_tokens - first), first=first), interval))
    assert rest == [each for each in whole if each > first]
    assert whole[:-1] == [each for each in range(1, num_tokens) if (each - 1) % interval == 0]


def test_what_is_held_comes_before_an_error() -> None:
    kept = Kept()
    sink = GroupingSink(kept, 8)
    for row in rows_of([1, 1, 1], ends=False):
        sink.take(0, row, chain.extend(row.chain, row.token_ids))
    assert [len(row.token_ids) for row in kept.rows] == [1]
    sink.fail(PenstockError(ErrorCode.UNAVAILABLE, "gone"))
    assert [len(row.token_ids) for row in kept.rows] == [1, 2]
    assert kept.error is not None
