"""On a GPU: the runner with Triton's kernels and graphs in bf16, and with plain torch in fp32, against transformers."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import LLAMA3_ROPE, MAX_POSITIONS, VOCAB_SIZE, Variant, save_checkpoint, save_rounded_checkpoint
from plans import Drive, drive
from transformers import PreTrainedModel

from penstock.domain.params import Sampling
from worker_svc.factory import LoadedRunner, load_runner
from worker_svc.runner_options import RunnerOptions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VARIANTS = (
    Variant("qwen3", "qwen3", {"head_dim": 128, "tie_word_embeddings": True}),
    Variant("qwen2", "qwen2", {"head_dim": 64}),
    Variant("llama", "llama", {"head_dim": 64, "rope_parameters": LLAMA3_ROPE, "attention_bias": True}),
)
# Weights are bf16 in both; activations are rounded to 8 bits a few times a layer, against logits some units apart. For
# the same prompts plain torch in bf16 is off by 0.55 once (Qwen2) and not at the maximum in up to 8 % of the tokens;
# rounding moves transformers' own logits by up to 0.6. What is wrong is off by several units, and often.
MAX_GAP = 0.75
MAX_SHARE_OFF = 0.15
NUM_PROMPTS = 40


def load(directory: Path, **options: object) -> LoadedRunner:
    defaults: dict[str, object] = {
        "device": "cuda",
        "max_num_seqs": NUM_PROMPTS,
        "num_blocks": 1500,
        "max_num_batched_tokens": 16384,
    }
    return load_runner(RunnerOptions(str(directory), **(defaults | options)), time.monotonic_ns)  # type: ignore[arg-type]


def sequences(sampling: Sampling) -> list[Drive]:
    rng = np.random.default_rng(3)
    lengths = [1, 2, 63, 64, 65, 400, *rng.integers(1, 400, NUM_PROMPTS - 6).tolist()]
    return [Drive(rng.integers(3, VOCAB_SIZE, length).tolist(), 24, sampling, seed=length) for length in lengths]


def gaps(model: PreTrainedModel, drives: list[Drive]) -> torch.Tensor:
    """How far each token is from the likeliest, in log-probability, as the whole sequence in fp32 says."""
    found = []
    for each in drives:
        with torch.inference_mode():
            logits = model(torch.tensor([each.token_ids + each.output], device="cuda")).logits[0]
        expected = logits[len(each.token_ids) - 1 : -1].log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(each.output, device="cuda")[:, None])[:, 0]
        found.append(expected.max(-1).values - chosen)
    return torch.cat(found)


def assert_near_the_likeliest(model: PreTrainedModel, drives: list[Drive]) -> None:
    found = gaps(model.to("cuda", torch.float32), drives)
    assert float(found.max()) < MAX_GAP
    assert float((found > 0).float().mean()) < MAX_SHARE_OFF


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("stagger", [0, 1])
def test_tokens_in_bf16_are_near_the_likeliest(
    variant: Variant, stagger: int, tmp_path: Path, *, cuda_graphs: bool
) -> None:
    model = save_rounded_checkpoint(tmp_path, variant)
    loaded = load(tmp_path, dtype="bfloat16", attention="triton", cuda_graphs=cuda_graphs)
    loaded.runner._cache.keys.fill_(torch.nan)
    loaded.runner._cache.values.fill_(torch.nan)
    drives = sequences(Sampling(temperature=0.0))
    drive(loaded.runner, drives, chunk=100, window=3, stagger=stagger)
    assert_near_the_likeliest(model, drives)


def test_slow_and_fast_samplers_mix_in_decode_graphs(tmp_path: Path) -> None:
    model = save_rounded_checkpoint(tmp_path, VARIANTS[0])
    loaded = load(tmp_path, dtype="bfloat16")
    drives = sequences(Sampling(temperature=0.0))
    for index, each in enumerate(drives):
        if index % 3 == 0:
            each.sampling = Sampling(temperature=0.0, num_logprobs=2)
        if index % 3 == 1:
            each.sampling = Sampling(temperature=1.0, top_k=1)
    drive(loaded.runner, drives, window=2)
    assert_near_the_likeliest(model, drives)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_tokens_in_fp32_are_those_of_transformers(variant: Variant, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, variant).to("cuda")
    drives = sequences(Sampling(temperature=0.0))
    drive(load(tmp_path, dtype="float32", max_model_len=MAX_POSITIONS).runner, drives, chunk=100, window=2, stagger=1)
    assert float(gaps(model, drives).max()) < 1e-4
