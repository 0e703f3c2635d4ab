"""Seeded sampling on a real model: a sequence draws its own tokens, whatever runs beside it or happens to it."""

from pathlib import Path

import numpy as np
import pytest
from byte_tokenizer import write_tokenizer
from checkpoints import VARIANTS, VOCAB_SIZE, save_checkpoint

from contract.domain import chain
from penstock import LLM, SamplingParams
from penstock.outputs import RequestOutput

MAX_TOKENS = 12
NUM_PROMPTS = 12
ABC = [64, 65, 66]  # as the byte tokenizer has them
# A different mixture of what changes the logits for each prompt.
MIXTURES = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20, "presence_penalty": 0.5},
    {"temperature": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 1.0, "frequency_penalty": 0.7, "logit_bias": {7: 2.0}},
    {"temperature": 1.0, "allowed_token_ids": list(range(40, 80, 3)), "presence_penalty": 0.5, "suppress_tokens": [43]},
    {"temperature": 1.0, "allowed_token_ids": ABC, "bad_words": ["ab", "bca", "cccc"]},
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sampled")
    save_checkpoint(directory, next(each for each in VARIANTS if each.name == "qwen3_tied"))
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, VOCAB_SIZE, 5 + 9 * index).tolist() for index in range(NUM_PROMPTS)]


def params(index: int, **changes: object) -> SamplingParams:
    values = {"seed": 1000 + index, "max_tokens": MAX_TOKENS, "ignore_eos": True, **MIXTURES[index % len(MIXTURES)]}
    return SamplingParams(**(values | changes))  # type: ignore[arg-type]


def make_llm(checkpoint: Path, **options: object) -> LLM:
    defaults = {"block_size": 4, "max_model_len": 128, "num_blocks": 512, "max_num_seqs": 16}
    return LLM(str(checkpoint), dtype="float32", **(defaults | options))  # type: ignore[arg-type]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(checkpoint: Path, prompts: list[list[int]]) -> list[list[int]]:
    llm = make_llm(checkpoint, plans_in_flight=1, enable_prefix_caching=False)
    return [tokens(llm.generate(prompt, params(index), use_tqdm=False))[0] for index, prompt in enumerate(prompts)]


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("budget", [16, 512])
def test_in_any_batch_at_any_window(
    checkpoint: Path, prompts: list[list[int]], alone: list[list[int]], window: int, budget: int
) -> None:
    llm = make_llm(checkpoint, plans_in_flight=window, max_num_batched_tokens=budget)
    all_params = [params(index) for index in range(NUM_PROMPTS)]
    assert tokens(llm.generate(prompts, all_params, use_tqdm=False)) == alone
    backwards = llm.generate(prompts[::-1], all_params[::-1], use_tqdm=False)
    assert tokens(backwards) == alone[::-1]


@pytest.mark.parametrize("window", [1, 2, 4])
def test_after_a_preemption(checkpoint: Path, prompts: list[list[int]], alone: list[list[int]], window: int) -> None:
    llm = make_llm(checkpoint, plans_in_flight=window, num_blocks=44)
    outputs = llm.generate(prompts, [params(index) for index in range(NUM_PROMPTS)], use_tqdm=False)
    assert llm.llm_engine.stats().counters.num_preemptions > 0
    assert tokens(outputs) == alone


def test_of_few_tokens_no_bad_word_is_made_though_they_are_launched_ahead(checkpoint: Path) -> None:
    bad = ["ab", "bca", "ccc"]
    asked = [
        SamplingParams(n=4, seed=1, temperature=2, max_tokens=60, allowed_token_ids=ABC, bad_words=words)
        for words in ([], bad)
    ]
    free, kept = make_llm(checkpoint, plans_in_flight=4).generate([[65, 64], [65, 64]], asked, use_tqdm=False)
    assert all(word in "".join(each.text for each in free.outputs) for word in bad)
    for each in kept.outputs:
        assert set(each.text) <= set("abc")
        assert not [word for word in bad if word in each.text]
    # The prompt's last token and the first of the output make no word: only the output counts.
    forced = SamplingParams(max_tokens=1, allowed_token_ids=ABC[1:2], bad_words=["ab"])
    (first,) = make_llm(checkpoint).generate([[65, 64]], forced, use_tqdm=False)
    assert first.outputs[0].text == "b"


def test_other_seeds_give_other_tokens(checkpoint: Path, prompts: list[list[int]], alone: list[list[int]]) -> None:
    llm = make_llm(checkpoint)
    others = [params(index, seed=5000 + index) for index in range(NUM_PROMPTS)]
    assert tokens(llm.generate(prompts, others, use_tqdm=False)) != alone


@pytest.mark.parametrize("num_blocks", [512, 40])
def test_n_samples_are_n_requests_with_the_derived_seeds(
    checkpoint: Path, prompts: list[list[int]], num_blocks: int
) -> None:
    llm = make_llm(checkpoint, num_blocks=num_blocks, max_model_len=128)
    together = llm.generate(prompts[:6], [params(index, n=3) for index in range(6)], use_tqdm=False)
    assert (llm.llm_engine.stats().counters.num_preemptions > 0) == (num_blocks == 40)
    one_by_one = make_llm(checkpoint, plans_in_flight=1, enable_prefix_caching=False)
    for index, output in enumerate(together):
        for sample in output.outputs:
            seed = chain.sequence_seed(1000 + index, sample.index)
            signed = seed - 2**64 if seed >= 2**63 else seed
            (single,) = one_by_one.generate(prompts[index], params(index, seed=signed), use_tqdm=False)
            assert sample.token_ids == single.outputs[0].token_ids
