"""Blocks that windows and chunks give up: nobody reads them, whatever is left there, and outputs stay transformers'."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from byte_tokenizer import write_tokenizer
from checkpoints import GEMMA3, GPT_OSS, LLAMA4, Variant, save_checkpoint
from reference import Reference, assert_equal, assert_prompt_equal, params_of
from spoiling import SpoilingRunner

from contract.domain.kv_kinds import KVKind, Reach, blocks_of_sequence
from penstock import LLM
from worker_svc.core.runner import ModelRunner

BLOCK_SIZE = 4
MAX_MODEL_LEN = 320
# Shorter than a chunk of 16 and as long, and one more; shorter than a block, as long, and one more.
WINDOWS = (3, 4, 5, 16, 17)
LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
FAMILIES = {  # and how many layers with a window, or chunks, there are for one without
    "gemma3": ({**GEMMA3, "num_hidden_layers": len(LAYERS), "layer_types": LAYERS}, 3),
    "gpt_oss": (GPT_OSS, 2),
    "llama4": (LLAMA4, 2),
}


def make_reference(family: str, window: int, directory: Path) -> Reference:
    bound = "attention_chunk_size" if family == "llama4" else "sliding_window"
    changes = {**FAMILIES[family][0], bound: window}
    model = save_checkpoint(directory, Variant(f"{family}_{window}", family, changes))
    write_tokenizer(directory)
    return Reference(directory, model)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Reference]:
    return cache(lambda family, window: make_reference(family, window, tmp_path_factory.mktemp(family)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
def test_whatever_is_left_in_blocks_that_were_given_up_changes_nothing(
    checkpoint: Callable[[str, int], Reference], family: str, window: int, caching: bool
) -> None:
    reference = checkpoint(family, window)
    reach = Reach(chunk=window) if family == "llama4" else Reach(window)
    kinds = KVKind(FAMILIES[family][1] * BLOCK_SIZE), KVKind(BLOCK_SIZE, reach)
    few = blocks_of_sequence(kinds, MAX_MODEL_LEN, 16) + 8
    llm = LLM(
        str(reference.directory),
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks=20 * few if caching else few,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=len(reference.answers),
        max_num_batched_tokens=16,
        enable_prefix_caching=caching,
        plans_in_flight=2,
    )
    engine = llm.llm_engine
    (worker,) = engine._scheduler.workers.values()
    assert isinstance(engine.runner, ModelRunner)
    assert (worker.limits.kinds, engine.runner.limits.kinds) == (kinds, kinds)
    spoiling = engine.runner = SpoilingRunner(engine.runner, worker)
    params = [params_of(index) for index in range(len(reference.answers))]
    outputs = llm.generate([answer.prompt for answer in reference.answers], params, use_tqdm=False)
    for index, (answer, output) in enumerate(zip(reference.answers, outputs, strict=True)):
        assert_prompt_equal(index, answer, output.prompt_logprobs)
        assert_equal(answer, output.outputs[0].token_ids, output.outputs[0].logprobs or [])
    counters = engine.stats().counters
    assert (counters.num_cached_tokens > 0) == caching
    # Of larger windows a pool that holds the longest prompt holds several others without trouble.
    assert caching or window > BLOCK_SIZE + 1 or counters.num_preemptions > 0
    assert spoiling.num_spoiled > 0
