"""A step is as large as the model and the card make sensible, unless somebody says."""

import pytest

from worker_svc.core.step_sizes import DEFAULT_SIZES, choose_step_sizes, peak_flops_per_s

H200 = peak_flops_per_s((9, 0), 132)
GIB = 1 << 30


@pytest.mark.parametrize(
    ("num_layer_weights", "num_tokens"),
    [(440_000_000, 8192), (1_000_000_000, 8192), (6_945_000_000, 1536), (70_000_000_000, 512)],
)
def test_a_larger_model_computes_fewer_tokens_in_a_step(num_layer_weights: int, num_tokens: int) -> None:
    sizes = choose_step_sizes(num_layer_weights, H200, 100 * GIB, 147_456)
    assert (sizes.max_num_batched_tokens, sizes.max_num_seqs) == (num_tokens, 256)


def test_a_smaller_card_computes_fewer_tokens_in_a_step() -> None:
    a100 = peak_flops_per_s((8, 0), 108)
    assert choose_step_sizes(1_000_000_000, a100, None, 1).max_num_batched_tokens == 3072


def test_of_a_device_that_is_not_known_nothing_is_guessed() -> None:
    assert peak_flops_per_s((7, 5), 40) is None
    assert choose_step_sizes(6_945_000_000, None, None, 1) == DEFAULT_SIZES


@pytest.mark.parametrize(("kv_bytes", "num_seqs"), [(0, 16), (40 * 128 * 100, 32), (10**9, 256)])
def test_no_more_sequences_run_than_there_is_memory_for(kv_bytes: int, num_seqs: int) -> None:
    assert choose_step_sizes(1, None, kv_bytes, 100).max_num_seqs == num_seqs
