"""Blocks and states that are free: nobody reads them, whatever is left there. Of windows and chunks, which give blocks
up while they run, `test_windows_given_up` sees to that.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from byte_tokenizer import write_tokenizer
from eight_bit_caches import save_with_scales
from reference import BUNDLED, Reference, assert_equal, assert_prompt_equal, params_of
from spoiling import SpoilingRunner
from test_eight_bit_caches import BATCHES, BY_NAME, PARAMS, is_alike, make_prompts

from penstock import LLM
from worker_svc.core.runner import ModelRunner

BLOCK_SIZE = 4
NAMES = (BUNDLED, "deepseek_v2_whole_queries", "deepseek_v3_biases", "qwen3_next_states", "qwen3_5_states")
FEW_BLOCKS = 84  # the longest prompt and its output need 77


def spoil(llm: LLM) -> SpoilingRunner:
    """Spoil what is free from now on."""
    engine = llm.llm_engine
    (worker,) = engine._scheduler.workers.values()
    assert isinstance(engine.runner, ModelRunner)
    spoiling = engine.runner = SpoilingRunner(engine.runner, worker)
    return spoiling


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_blocks", [FEW_BLOCKS, 600])
def test_whatever_is_left_in_free_blocks_and_states_changes_nothing(
    reference: Callable[[str], Reference], name: str, num_blocks: int
) -> None:
    expected = reference(name)
    llm = LLM(
        str(expected.directory),
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_model_len=FEW_BLOCKS * BLOCK_SIZE,
        max_num_seqs=12,
        max_num_batched_tokens=32,
        num_saved_states=5 if "states" in name else None,
        min_saved_tokens=8,
    )
    spoiling = spoil(llm)
    params = [params_of(index) for index in range(len(expected.answers))]
    outputs = llm.generate([answer.prompt for answer in expected.answers], params, use_tqdm=False)
    for index, (answer, output) in enumerate(zip(expected.answers, outputs, strict=True)):
        assert_prompt_equal(index, answer, output.prompt_logprobs)
        assert_equal(answer, output.outputs[0].token_ids, output.outputs[0].logprobs or [])
    assert (llm.llm_engine.stats().counters.num_preemptions > 0) == (num_blocks == FEW_BLOCKS)
    assert spoiling.num_spoiled > 0
    assert (spoiling.num_spoiled_states > 0) == ("states" in name)


@pytest.mark.parametrize("name", ["qwen3_biases", "gpt_oss_sinks"])
@pytest.mark.parametrize("batch", ["pieces", "preempted"])
def test_whatever_is_left_in_free_blocks_of_8_bits_changes_nothing(name: str, batch: str, tmp_path: Path) -> None:
    model = save_with_scales(tmp_path, BY_NAME[name])
    write_tokenizer(tmp_path)
    options = {"dtype": "float32", "kv_cache_dtype": "fp8", "block_size": BLOCK_SIZE, "max_model_len": 256}
    llm = LLM(str(tmp_path), **options, **BATCHES[batch])  # type: ignore[arg-type]
    spoiling = spoil(llm)
    outputs = [each.outputs[0] for each in llm.generate(make_prompts(), PARAMS, use_tqdm=False)]
    assert all(is_alike(model, prompt, output) for prompt, output in zip(make_prompts(), outputs, strict=True))
    assert spoiling.num_spoiled > 0
