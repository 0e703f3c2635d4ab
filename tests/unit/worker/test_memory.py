"""How many blocks there are, and what is said when they are too few."""

import pytest

from penstock.domain.errors import PenstockError
from worker_svc.core.memory import DEFAULT_CPU_KV_CACHE_BYTES, cpu_kv_cache_bytes, fit_model_len


def test_a_cpu_takes_what_is_asked_or_a_modest_default_that_slots_can_fill() -> None:
    assert cpu_kv_cache_bytes(5000, 100, 3) == 5000
    assert cpu_kv_cache_bytes(None, 100, 3) == 300
    assert cpu_kv_cache_bytes(None, 1 << 20, 10_000) == DEFAULT_CPU_KV_CACHE_BYTES


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
