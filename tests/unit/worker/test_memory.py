"""How many blocks there are, and what is said when they are too few."""

import pytest

from penstock.domain.errors import PenstockError
from worker_svc.core.memory import fit_model_len, num_blocks_in


def test_blocks_fill_the_memory_but_no_more_than_all_slots_can_use() -> None:
    assert num_blocks_in(5050, 100, max_num_seqs=8, max_model_len=100, block_size=16) == 50
    assert num_blocks_in(1 << 40, 100, max_num_seqs=8, max_model_len=100, block_size=16) == 56
    assert num_blocks_in(-5, 100, max_num_seqs=8, max_model_len=100, block_size=16) == 0


def test_a_context_that_fits_is_kept() -> None:
    assert fit_model_len(64, 4, 16, 100, explicit=True) == 64


def test_a_context_that_was_not_asked_for_is_cut_to_what_fits() -> None:
    assert fit_model_len(4096, 4, 16, 100, explicit=False) == 64


def test_a_context_that_was_asked_for_must_fit_and_the_error_says_what_is_missing() -> None:
    with pytest.raises(PenstockError, match=r"needs 4\.0 MiB of KV cache, 3\.0 MiB more than there is"):
        fit_model_len(64, 1, 16, 1 << 20, explicit=True)


def test_not_even_one_block_is_an_error_in_any_case() -> None:
    with pytest.raises(PenstockError, match=r"4\.0 MiB more"):
        fit_model_len(64, 0, 16, 1 << 20, explicit=False)
