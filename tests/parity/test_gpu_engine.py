"""On a GPU: `LLM` with the bundled model in fp32 and bf16 against transformers, a long context, and memory."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import Variant, save_rounded_checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock import LLM, SamplingParams
from penstock.domain.errors import PenstockError
from penstock.launcher.layout import BUNDLED_MODEL

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NUM_PROMPTS = 64
NUM_TOKENS = 24
FIRST_ID = 3  # behind the special ones
# See `test_gpu_parity`: activations are rounded to 8 bits a few times a layer.
MAX_GAP_BF16 = 0.5
# Of a random model whose logits are some units apart: a wrong token lies about five below the likeliest.
MAX_GAP_RANDOM = 1.5
LONG = 32_768
LATE_BYTES = 256 << 20  # kernels that are first needed, and loaded, after the memory was divided


def make_prompts() -> list[list[int]]:
    rng = np.random.default_rng(11)
    lengths = [1, 2, 15, 16, 17, 700, *rng.integers(1, 200, NUM_PROMPTS - 6).tolist()]
    return [rng.integers(FIRST_ID, 2048, length).tolist() for length in lengths]


PROMPTS = make_prompts()


def generate(llm: LLM, params: SamplingParams, *, at_once: int = NUM_PROMPTS) -> list[list[int]]:
    found = []
    for first in range(0, NUM_PROMPTS, at_once):
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS[first : first + at_once]]
        found += [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    return found


def gap(model: PreTrainedModel, prompt: list[int], output: list[int]) -> float:
    """How far a token is at most from the likeliest, in log-probability, as the whole sequence says."""
    with torch.inference_mode():
        kept = model(torch.tensor([prompt + output], device="cuda"), logits_to_keep=len(output) + 1).logits[0, :-1]
    expected = kept.float().log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(output, device="cuda")[:, None])[:, 0]
    return float((expected.max(-1).values - chosen).max())


@pytest.fixture(scope="module")
def bundled() -> PreTrainedModel:
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    return AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).to("cuda").eval()


def engine(**options: object) -> LLM:
    return LLM(str(BUNDLED_MODEL), num_blocks=1200, **options)  # type: ignore[arg-type]


def test_greedy_tokens_in_fp32_are_those_of_transformers(bundled: PreTrainedModel) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    found = []
    for window, chunk, at_once in ((1, 2048, 1), (2, 16, NUM_PROMPTS), (4, 100, NUM_PROMPTS), (2, 2048, 7)):
        llm = engine(dtype="float32", window=window, max_num_batched_tokens=max(chunk, 16), max_num_seqs=NUM_PROMPTS)
        found.append(generate(llm, params, at_once=at_once))
        llm.llm_engine.close()
    assert all(each == found[0] for each in found)
    # Greater than nought only where two tokens are equally likely but for rounding.
    assert max(map(gap, [bundled] * NUM_PROMPTS, PROMPTS, found[0])) < 1e-4


def test_seeded_samples_do_not_depend_on_the_batch() -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True)
    llm = engine(dtype="float32", max_num_seqs=NUM_PROMPTS)
    assert generate(llm, params, at_once=1) == generate(llm, params, at_once=9) == generate(llm, params)
    llm.llm_engine.close()


def test_tokens_in_bf16_are_near_the_likeliest(bundled: PreTrainedModel) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for at_once in (1, NUM_PROMPTS):
        llm = engine(dtype="bfloat16", max_num_seqs=NUM_PROMPTS)
        found = generate(llm, params, at_once=at_once)
        llm.llm_engine.close()
        assert max(map(gap, [bundled] * NUM_PROMPTS, PROMPTS, found)) < MAX_GAP_BF16


def test_a_context_of_32k_tokens_is_computed_as_the_reference_does(tmp_path: Path) -> None:
    options = {"head_dim": 128, "num_hidden_layers": 2, "max_position_embeddings": LONG, "vocab_size": 2048}
    reference = save_rounded_checkpoint(tmp_path, Variant("long", "qwen3", options)).to("cuda")
    # Any tokenizer serves: prompts are ids.
    (tmp_path / "tokenizer.json").write_bytes((BUNDLED_MODEL / "tokenizer.json").read_bytes())
    prompt = np.random.default_rng(2).integers(FIRST_ID, 2048, LONG - NUM_TOKENS).tolist()
    llm = LLM(str(tmp_path), dtype="bfloat16", max_num_batched_tokens=4096, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    beside = [{"prompt_token_ids": ids} for ids in (PROMPTS[5], PROMPTS[6])]
    outputs = llm.generate([{"prompt_token_ids": prompt}, *beside], params, use_tqdm=False)
    llm.llm_engine.close()
    for output, each in zip(outputs, (prompt, PROMPTS[5], PROMPTS[6]), strict=True):
        assert gap(reference, each, output.outputs[0].token_ids) < MAX_GAP_RANDOM


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    with pytest.raises(PenstockError, match=r"weights need .* more than there is: gpu_memory_utilization 1e-06 of"):
        LLM(str(BUNDLED_MODEL), dtype="bfloat16", gpu_memory_utilization=1e-6)


def test_all_memory_stays_within_the_share() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    share = (total_bytes - free_bytes) / total_bytes + 0.03
    # More slots than the KV cache has room for: it takes all that it is given.
    llm = LLM(str(BUNDLED_MODEL), dtype="bfloat16", gpu_memory_utilization=share, max_num_seqs=1024)
    generate(llm, SamplingParams(temperature=0.9, top_p=0.9, logprobs=3, max_tokens=NUM_TOKENS))
    free_bytes, _ = torch.cuda.mem_get_info()
    used_bytes = total_bytes - free_bytes
    llm.llm_engine.close()
    assert (share - 0.02) * total_bytes < used_bytes <= share * total_bytes + LATE_BYTES
