"""Log and witness: generation goes on behind the longer of the two, if one is the beginning of the other."""

from collections.abc import Sequence

import numpy as np
import pytest

from contract.domain import chain
from contract.domain.errors import ErrorCode
from contract.domain.finish import FinishReason
from contract.domain.plan import Logprobs
from scheduler_svc.core.history import History, diverged_rows, restore
from scheduler_svc.core.rows import take_logprobs

ID = b"r" * 16
MODEL = b"model---"


def history(token_ids: Sequence[int] = (), *, has_ended: bool = False, model: bytes = b"") -> History:
    made = History(model_digest=model)
    made.extend(np.array(token_ids, np.uint32))
    made.has_ended = has_ended
    return made


def goes_on(_: Sequence[int]) -> FinishReason:
    return FinishReason.UNSPECIFIED


def tokens(*token_ids: int) -> np.ndarray:
    return np.array(token_ids, np.uint32)


@pytest.mark.parametrize("witness", [(), (1,), (1, 2, 3)])
def test_a_log_that_has_all_that_the_client_has_stays_as_it_is(witness: tuple[int, ...]) -> None:
    histories = [history((1, 2, 3))]
    rows = restore(ID, histories, [tokens(*witness)], [], goes_on, model_digest=MODEL)
    assert rows is not None
    assert len(rows) == len(rows.token_ids) == 0
    assert histories == [history((1, 2, 3))]


def test_what_the_log_lacks_becomes_rows_behind_it() -> None:
    histories = [history((1, 2)), history((7,)), history()]
    rows = restore(ID, histories, [tokens(1, 2, 3, 4), tokens(7), tokens(5)], [], goes_on, model_digest=MODEL)
    assert rows is not None
    assert rows.request_ids == [ID, ID]
    assert rows.sequences.tolist() == [0, 2]
    assert rows.positions.tolist() == [2, 0]
    assert rows.chains.tolist() == [chain.extend(chain.CHAIN_START, (1, 2)), chain.CHAIN_START]
    assert rows.counts.tolist() == [2, 1]
    assert rows.token_ids.tolist() == [3, 4, 5]
    assert not rows.finishes.any()
    assert histories == [history((1, 2, 3, 4), model=MODEL), history((7,)), history((5,), model=MODEL)]


def test_restored_rows_are_taken_by_a_reader_of_the_log() -> None:
    reader, histories = history((1, 2)), [history((1, 2))]
    rows = restore(ID, histories, [tokens(1, 2, 3)], [], goes_on, model_digest=MODEL)
    assert rows is not None
    reader.take(int(rows.positions[0]), int(rows.chains[0]), int(rows.finishes[0]), rows.token_ids, rows.model_digest)
    assert reader == histories[0]


def test_restored_rows_have_the_logprobs_that_were_told() -> None:
    """Of the second sequence none were, of the third those of its first token."""
    histories = [history((1, 2)), history((7,)), history()]
    told = Logprobs(
        sampled=-np.arange(4, dtype=np.float32),
        ranks=tokens(1, 2, 3, 4),
        top_counts=tokens(1, 0, 2, 1),
        top_ids=tokens(10, 30, 31, 40),
        top_logprobs=-np.arange(4, dtype=np.float32),
    )
    first = take_logprobs(told, np.array([0]))
    witness = [tokens(1, 2, 3, 4), tokens(7, 8), tokens(5, 6)]
    rows = restore(ID, histories, witness, [told, None, first], goes_on, model_digest=MODEL)
    assert rows is not None
    assert rows.logprobs is not None
    np.testing.assert_array_equal(rows.logprobs.sampled, np.array([-2, -3, np.nan, 0, np.nan], np.float32))
    assert rows.logprobs.ranks.tolist() == [3, 4, 0, 1, 0]
    assert rows.logprobs.top_counts.tolist() == [2, 1, 0, 1, 0]
    assert rows.logprobs.top_ids.tolist() == [30, 31, 40, 10]


def test_a_restored_end_stands_in_the_row_of_its_token() -> None:
    histories = [history((1,)), history((1,))]
    rows = restore(
        ID,
        histories,
        [tokens(1, 9), tokens(1, 2)],
        [],
        lambda output: FinishReason.STOP if output[-1] == 9 else FinishReason.UNSPECIFIED,
        model_digest=MODEL,
    )
    assert rows is not None
    assert rows.finishes.tolist() == [FinishReason.STOP, FinishReason.UNSPECIFIED]
    assert histories == [history((1, 9), has_ended=True, model=MODEL), history((1, 2), model=MODEL)]


def test_a_witness_of_fewer_sequences_says_nothing_of_the_others() -> None:
    histories = [history((1,)), history((2,))]
    rows = restore(ID, histories, [tokens(1, 5)], [], goes_on, model_digest=MODEL)
    assert rows is not None
    assert rows.sequences.tolist() == [0]


@pytest.mark.parametrize(
    ("logged", "has_ended", "witness"),
    [((1, 2, 3), False, (1, 9)), ((1, 2), False, (1, 9, 3)), ((1, 2), False, (9,)), ((1, 2), True, (1, 2, 3))],
    ids=["shorter", "longer", "first", "behind-the-end"],
)
def test_another_history_is_not_spliced_in(logged: tuple[int, ...], has_ended: bool, witness: tuple[int, ...]) -> None:
    histories = [history((5,)), history(logged, has_ended=has_ended)]
    assert restore(ID, histories, [tokens(5, 6), tokens(*witness)], [], goes_on, model_digest=MODEL) is None
    assert histories == [history((5,)), history(logged, has_ended=has_ended)]


def test_what_cannot_go_on_ends_behind_its_log_with_a_typed_error() -> None:
    rows = diverged_rows(ID, [history((1, 2)), history((3,), has_ended=True), history()])
    assert rows.sequences.tolist() == [0, 2]
    assert rows.positions.tolist() == [2, 0]
    assert rows.chains.tolist() == [chain.extend(chain.CHAIN_START, (1, 2)), chain.CHAIN_START]
    assert rows.finishes.tolist() == [FinishReason.ERROR] * 2
    assert {row: error.code for row, error in rows.errors.items()} == dict.fromkeys((0, 1), ErrorCode.STREAM_DIVERGED)
