"""On a GPU: `LLM` with the bundled model in fp32 and bf16 against transformers, a long context, and memory.

What is exact in fp32 is so on plain torch: see `test_gpu_parity`.
"""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import Variant, save_rounded_checkpoint
from near_the_likeliest import load
from reference import likeliest
from teacher import Answered, expected_logprobs, gaps, logprob_errors
from transformers import AutoModelForCausalLM, PreTrainedModel

from contract.domain.errors import PenstockError
from contract.domain.params import Sampling
from contract.domain.plan import Admission, StepPlan
from penstock import LLM, SamplingParams
from penstock.launcher.layout import BUNDLED_MODEL
from penstock.outputs import RequestOutput

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NUM_PROMPTS = 64
NUM_TOKENS = 24
NUM_TOP = 3
FIRST_ID = 3  # behind the special ones
# See `near_the_likeliest`: activations are rounded to 8 bits a few times a layer.
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


def generate(llm: LLM, params: SamplingParams, *, at_once: int = NUM_PROMPTS) -> list[Answered]:
    found = []
    for first in range(0, NUM_PROMPTS, at_once):
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS[first : first + at_once]]
        found += map(answer_of, llm.generate(prompts, params, use_tqdm=False))
    return found


def answer_of(output: RequestOutput) -> Answered:
    (sample,) = output.outputs
    entries = sample.logprobs or []
    logprobs = [told[token_id].logprob for told, token_id in zip(entries, sample.token_ids, strict=bool(entries))]
    tops = [likeliest(told, NUM_TOP) for told in entries]
    return Answered(output.prompt_token_ids, sample.token_ids, logprobs, tops)


def gap(model: PreTrainedModel, answer: Answered) -> float:
    """How far a token is at most from the likeliest."""
    return float(gaps(expected_logprobs(model, answer), answer).max())


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
        llm = engine(
            dtype="float32", plans_in_flight=window, max_num_batched_tokens=max(chunk, 16), max_num_seqs=NUM_PROMPTS
        )
        found.append(generate(llm, params, at_once=at_once))
        llm.llm_engine.close()
    assert all(each == found[0] for each in found)
    # Greater than nought only where two tokens are equally likely but for rounding.
    assert max(gap(bundled, each) for each in found[0]) < 1e-4


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
        assert max(gap(bundled, each) for each in found) < MAX_GAP_BF16


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("bfloat16", MAX_GAP_BF16)])
def test_logprobs_of_drawn_tokens_and_of_the_likeliest_are_those_of_transformers(
    dtype: str, bound: float, bundled: PreTrainedModel
) -> None:
    params = SamplingParams(
        temperature=0.9, top_p=0.9, seed=5, logprobs=NUM_TOP, max_tokens=NUM_TOKENS, ignore_eos=True
    )
    llm = engine(dtype=dtype, max_num_seqs=NUM_PROMPTS)
    found = generate(llm, params)
    llm.llm_engine.close()
    errors = torch.cat([logprob_errors(expected_logprobs(bundled, each), each, NUM_TOP) for each in found])
    assert float(errors.max()) < bound
    assert float(errors.mean()) < bound / 5
    # Drawn: others than the likeliest are among them.
    assert max(gap(bundled, each) for each in found) > 1


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
    assert [len(output.prompt_token_ids) for output in outputs] == [len(prompt), len(PROMPTS[5]), len(PROMPTS[6])]
    assert max(gap(reference, answer_of(output)) for output in outputs) < MAX_GAP_RANDOM


def test_penalties_of_a_full_context_stay_within_what_was_planned_for_a_step(tmp_path: Path) -> None:
    options = {"head_dim": 128, "num_hidden_layers": 2, "max_position_embeddings": LONG, "vocab_size": 2048}
    save_rounded_checkpoint(tmp_path, Variant("long", "qwen3", options))
    # Torch looks at whole histories at once.
    loaded = load(
        tmp_path, dtype="bfloat16", attention="torch", max_num_batched_tokens=2048, num_blocks=LONG // 16 + NUM_PROMPTS
    )
    runner = loaded.runner
    blocks = np.arange(runner.limits.num_blocks, dtype=np.uint32)
    # All that the first has to compute is its last token; what its cache has is not asked for.
    ids = [np.full(LONG, 7, np.uint32), *[np.full(2, 7, np.uint32)] * (runner.limits.max_num_seqs - 1)]
    held = [blocks[NUM_PROMPTS:], *blocks[: len(ids) - 1, None]]
    admissions = tuple(
        Admission(slot, tokens, len(tokens), len(tokens) - 1, held[slot], Sampling(presence_penalty=0.5), seed=slot)
        for slot, tokens in enumerate(ids)
    )
    slots = np.arange(len(ids), dtype=np.uint32)
    gc.collect()
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runner.launch(StepPlan(1, admissions=admissions, slots=slots, num_tokens=np.ones_like(slots))).result()
    peak_bytes = torch.cuda.max_memory_allocated() - before_bytes
    # Of each token its id twice, as it comes and as it is counted, and a one, among others.
    assert 20 * len(ids) * LONG < peak_bytes <= loaded.profile.activation_bytes


def test_steps_may_have_fewer_tokens_than_there_are_slots() -> None:
    llm = engine(dtype="bfloat16", max_num_batched_tokens=20, max_num_seqs=NUM_PROMPTS)
    found = generate(llm, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    llm.llm_engine.close()
    assert [len(each.token_ids) for each in found] == [4] * NUM_PROMPTS


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
    generate(llm, SamplingParams(temperature=0.9, top_p=0.9, logprobs=NUM_TOP, max_tokens=NUM_TOKENS))
    free_bytes, _ = torch.cuda.mem_get_info()
    used_bytes = total_bytes - free_bytes
    llm.llm_engine.close()
    assert (share - 0.02) * total_bytes < used_bytes <= share * total_bytes + LATE_BYTES
