"""How many blocks there are, and what is said when something does not fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.domain.errors import PenstockError
from contract.domain.kv_kinds import KVKind, Reach
from worker_svc.core.memory import Budget, MemoryProfile, fit_model_len, num_blocks_in
from worker_svc.profiling import full_lengths

MIB, GIB = 1 << 20, 1 << 30
KINDS = (KVKind(16),)


def profile(num_blocks: int, block_bytes: int) -> MemoryProfile:
    return MemoryProfile(0, 3 * GIB, 2 * GIB, num_blocks * block_bytes, block_bytes, num_blocks, graph_bytes=GIB // 2)


def test_blocks_fill_the_memory_but_no_more_than_all_slots_can_use() -> None:
    assert num_blocks_in(5050, 100, max_num_seqs=8, blocks_each=7) == 50
    assert num_blocks_in(1 << 40, 100, max_num_seqs=8, blocks_each=7) == 56
    assert num_blocks_in(-5, 100, max_num_seqs=8, blocks_each=7) == 0


def test_a_context_that_fits_is_kept() -> None:
    assert fit_model_len(64, profile(4, 100), KINDS, 512, None, explicit=True) == 64


def test_a_context_that_was_not_asked_for_is_cut_to_what_fits() -> None:
    assert fit_model_len(4096, profile(4, 100), KINDS, 512, None, explicit=False) == 64


def test_a_context_that_was_asked_for_must_fit_and_the_error_says_what_is_missing() -> None:
    with pytest.raises(PenstockError, match=r"needs 4\.0 MiB of KV cache, 3\.0 MiB more than there is: lower"):
        fit_model_len(64, profile(1, MIB), KINDS, 512, None, explicit=True)


def test_of_a_window_no_more_is_wanted_than_a_sequence_has_at_once() -> None:
    kinds = KVKind(64), KVKind(16, Reach(32))
    assert fit_model_len(640, profile(10 + 5, 100), kinds, 32, None, explicit=True) == 640
    assert fit_model_len(4096, profile(10 + 5, 100), kinds, 32, None, explicit=False) == 640
    with pytest.raises(PenstockError, match=r"needs 15\.0 MiB of KV cache, 1\.0 MiB more"):
        fit_model_len(640, profile(14, MIB), kinds, 32, None, explicit=True)


def test_not_even_one_block_is_an_error_in_any_case() -> None:
    with pytest.raises(PenstockError, match=r"4\.0 MiB more"):
        fit_model_len(64, profile(0, MIB), KINDS, 512, None, explicit=False)


def test_on_a_gpu_the_error_says_who_has_the_memory() -> None:
    with pytest.raises(PenstockError) as caught:
        fit_model_len(64, profile(0, MIB), KINDS, 512, Budget(8 * GIB, 0.75, GIB), explicit=False)
    for part in ("0.75 of 8.0 GiB", "less 1.0 GiB", "weights 3.0 GiB", "step 2.0 GiB", "graphs 512.0 MiB"):
        assert part in caught.value.message
    assert "raise gpu_memory_utilization" in caught.value.message


def test_weights_must_fit_into_what_others_leave_of_the_share() -> None:
    budget = Budget(8 * GIB, 0.75, GIB)
    assert budget.usable_bytes == 5 * GIB
    budget.check_weights(5 * GIB)
    with pytest.raises(
        PenstockError, match=r"weights need 7\.0 GiB, 2\.0 GiB more than there is: .* 0\.75 of 8\.0 GiB"
    ):
        budget.check_weights(7 * GIB)


@given(st.integers(1, 300), st.integers(0, 20_000), st.integers(1, 5000))
def test_the_step_by_which_memory_is_measured_is_as_full_as_any(
    max_num_seqs: int, more_tokens: int, max_model_len: int
) -> None:
    max_num_batched_tokens = max_num_seqs + more_tokens
    lengths = full_lengths(max_num_batched_tokens, max_num_seqs, max_model_len)
    assert len(lengths) == max_num_seqs
    assert all(1 <= length <= max_model_len for length in lengths)
    assert sum(lengths) == min(max_num_batched_tokens, max_num_seqs * max_model_len)


def test_where_contexts_are_shorter_than_a_step_it_has_several_that_are_as_long_as_any() -> None:
    assert full_lengths(100, 4, 40) == [40, 40, 19, 1]
    assert full_lengths(100, 4, 1000) == [97, 1, 1, 1]
