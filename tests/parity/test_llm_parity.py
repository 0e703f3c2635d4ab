"""`LLM` against transformers: 32 prompts at once equal 32 prompts one by one, whatever is switched on."""

from collections.abc import Callable

import pytest
from cases import BLOCK_SIZE, CASES, CHECKPOINTS, FEW_BLOCKS, Case, assert_switched_on
from checkpoints import VARIANTS
from recorder import Recorder
from reference import NUM_PROMPTS, Reference, assert_equal, assert_prompt_equal, params_of

from penstock import LLM

EXTREMES = [Case(2, 16, True, FEW_BLOCKS), Case(4, 512, False, FEW_BLOCKS)]
PAIRS = [(name, case) for name in CHECKPOINTS for case in CASES] + [
    (variant.name, case) for variant in VARIANTS if variant.name not in CHECKPOINTS for case in EXTREMES
]


def check(reference: Reference, case: Case) -> None:
    llm = LLM(
        str(reference.directory),
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks=case.num_blocks,
        max_model_len=FEW_BLOCKS * BLOCK_SIZE,
        max_num_seqs=NUM_PROMPTS,
        max_num_batched_tokens=case.budget,
        enable_prefix_caching=case.enable_prefix_caching,
        plans_in_flight=case.window,
    )
    recorder = llm.llm_engine.runner = Recorder(llm.llm_engine.runner)
    params = [params_of(index) for index in range(NUM_PROMPTS)]
    outputs = llm.generate([answer.prompt for answer in reference.answers], params, use_tqdm=False)
    for index, (answer, output) in enumerate(zip(reference.answers, outputs, strict=True)):
        assert_prompt_equal(index, answer, output.prompt_logprobs)
        assert_equal(answer, output.outputs[0].token_ids, output.outputs[0].logprobs or [])
    counters = llm.llm_engine.stats().counters
    assert recorder.most_in_flight == case.window
    assert_switched_on(case, recorder, counters)
    assert sum(output.num_cached_tokens for output in outputs) == counters.num_cached_tokens


@pytest.mark.parametrize(("name", "case"), PAIRS, ids=str)
def test_a_batch_equals_transformers_one_by_one(reference: Callable[[str], Reference], name: str, case: Case) -> None:
    check(reference(name), case)
