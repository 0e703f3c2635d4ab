"""The model runner against transformers: greedy tokens and top-5 logprobs, fp32 on the CPU."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import VARIANTS, VOCAB_SIZE, Variant, save_checkpoint
from plans import Drive, drive
from teacher import Answered, expected_logprobs, gaps, logprob_errors
from transformers import PreTrainedModel

from contract.domain.params import Sampling
from worker_svc.factory import LoadedRunner, load_runner
from worker_svc.runner_options import RunnerOptions

NUM_TOP = 5
MAX_TOKENS = 6


def load(directory: Path, **options: object) -> LoadedRunner:
    defaults: dict[str, object] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 32, "num_blocks": 640}
    return load_runner(RunnerOptions(str(directory), **(defaults | options)), time.monotonic_ns)  # type: ignore[arg-type]


def prompts(count: int, seed: int = 3) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    lengths = [1, 2, 15, 16, 17, 300, *rng.integers(1, 301, max(0, count - 6)).tolist()][:count]
    return [rng.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]


def assert_like_reference(model: PreTrainedModel, sequences: list[Drive]) -> None:
    for sequence in sequences:
        assert len(sequence.output) == sequence.max_tokens
        answer = Answered.of(sequence)
        expected = expected_logprobs(model, answer)
        assert sequence.output == expected.argmax(-1).tolist()
        assert float(logprob_errors(expected, answer, NUM_TOP).max()) < 1e-4


def greedy(count: int) -> list[Drive]:
    return [Drive(prompt, MAX_TOKENS, Sampling(temperature=0.0, num_logprobs=NUM_TOP)) for prompt in prompts(count)]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_greedy_tokens_and_logprobs_equal_transformers(variant: Variant, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, variant)
    loaded = load(tmp_path)
    sequences = greedy(12)
    stats = drive(loaded.runner, sequences, chunk=64, window=2, stagger=1)
    assert stats.num_chunked > 0
    assert stats.num_mixed > 0
    assert stats.most_in_flight == 2
    assert_like_reference(model, sequences)


@pytest.mark.parametrize("chunk", [16, 512])
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("stagger", [0, 1])
def test_chunks_window_and_mixed_batches_do_not_matter(chunk: int, window: int, stagger: int, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, VARIANTS[1])
    loaded = load(tmp_path, max_num_batched_tokens=16384)
    sequences = greedy(32)
    stats = drive(loaded.runner, sequences, chunk=chunk, window=window, stagger=stagger)
    assert (stats.num_chunked > 0) == (chunk < 300)
    assert stats.most_in_flight == window
    assert_like_reference(model, sequences)


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_any_block_size_gives_the_same(block_size: int, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, VARIANTS[6])
    loaded = load(tmp_path, block_size=block_size, num_blocks=3000 // block_size + 12)
    sequences = greedy(10)
    drive(loaded.runner, sequences, chunk=50)
    assert_like_reference(model, sequences)


def test_what_is_left_in_blocks_and_slots_does_not_matter(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, VARIANTS[0])
    loaded = load(tmp_path)
    for _ in range(2):
        sequences = greedy(8)
        drive(loaded.runner, sequences, chunk=100)
        assert_like_reference(model, sequences)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_are_converted_to_the_dtype_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, VARIANTS[4])
    model.to(dtype).save_pretrained(tmp_path)
    stored = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    loaded = load(tmp_path)
    sequences = greedy(6)
    drive(loaded.runner, sequences)
    assert_like_reference(stored, sequences)


def test_bfloat16_runs_and_stays_close_to_float32(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, VARIANTS[4])
    loaded = load(tmp_path, dtype="bfloat16")
    sequences = greedy(4)
    drive(loaded.runner, sequences)
    for sequence in sequences:
        answer = Answered.of(sequence)
        expected = expected_logprobs(model, answer)
        assert float(gaps(expected, answer).max()) < 0.5
        assert float(logprob_errors(expected, answer, NUM_TOP).max()) < 0.5
