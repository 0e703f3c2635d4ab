"""`LLM` against transformers: 32 prompts at once equal 32 prompts one by one, whatever is switched on; 16 of
checkpoints that differ in little from others.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from cases import (
    BLOCK_SIZE,
    CASES,
    CHECKPOINTS,
    FEW_BLOCKS,
    MIN_SAVED_TOKENS,
    Case,
    assert_switched_on,
    cases_of,
    num_blocks_of,
)
from checkpoints import VARIANTS
from recorder import Recorder
from reference import (
    BUNDLED,
    NUM_PROMPTS,
    PARAMS,
    Reference,
    assert_equal,
    assert_prompt_equal,
    params_of,
)

from penstock import LLM

FEW_PROMPTS = 16  # of all lengths, and some with beginnings that they share
EXTREMES = [Case(2, 16, True, FEW_BLOCKS), Case(4, 512, False, FEW_BLOCKS)]
PAIRS = [(name, case) for number, name in enumerate(CHECKPOINTS) for case in cases_of(number)] + [
    (variant.name, case) for variant in VARIANTS if variant.name not in CHECKPOINTS for case in EXTREMES
]


def test_every_case_is_some_checkpoints() -> None:
    assert {case for name, case in PAIRS if name in CHECKPOINTS} == set(CASES)


def check(reference: Reference, case: Case, num_prompts: int = NUM_PROMPTS) -> None:
    answers = reference.first(num_prompts)
    llm = LLM(
        str(reference.directory),
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks_of(case, reference.directory, case.budget),
        max_model_len=FEW_BLOCKS * BLOCK_SIZE,
        max_num_seqs=NUM_PROMPTS,
        max_num_batched_tokens=case.budget,
        enable_prefix_caching=case.enable_prefix_caching,
        min_saved_tokens=MIN_SAVED_TOKENS,
        plans_in_flight=case.window,
    )
    recorder = llm.llm_engine.runner = Recorder(llm.llm_engine.runner)
    params = [params_of(index) for index in range(num_prompts)]
    outputs = llm.generate([answer.prompt for answer in answers], params, use_tqdm=False)
    for index, (answer, output) in enumerate(zip(answers, outputs, strict=True)):
        assert_prompt_equal(index, answer, output.prompt_logprobs)
        assert_equal(answer, output.outputs[0].token_ids, output.outputs[0].logprobs or [])
    counters = llm.llm_engine.stats().counters
    # One more while steps are short, which depends on the machine.
    assert recorder.most_in_flight in (case.window, case.window + 1)
    assert_switched_on(case, recorder, counters)
    assert sum(output.num_cached_tokens for output in outputs) == counters.num_cached_tokens


def test_logprobs_of_chosen_tokens_are_those_of_transformers_beside_others(
    reference: Callable[[str], Reference],
) -> None:
    found = reference(BUNDLED)
    answers = found.answers[:12]
    llm = LLM(str(found.directory), dtype="float32", max_num_seqs=8)
    params = [
        PARAMS if index % 3 == 0 else replace(PARAMS, logprobs=0, logprob_token_ids=answer.top_ids[0][: index % 4 + 1])
        for index, answer in enumerate(answers)
    ]
    outputs = llm.generate([answer.prompt for answer in answers], params, use_tqdm=False)
    for answer, asked, output in zip(answers, params, outputs, strict=True):
        told = output.outputs[0].logprobs
        assert told is not None
        if not asked.logprob_token_ids:
            assert_equal(answer, output.outputs[0].token_ids, told)
            continue
        assert output.outputs[0].token_ids == answer.token_ids
        wanted = dict(zip(answer.top_ids[0], answer.top_logprobs[0], strict=True))
        assert told[0].keys() == {answer.token_ids[0], *asked.logprob_token_ids}
        assert {each: told[0][each].logprob for each in told[0]} == pytest.approx(
            {each: wanted[each] for each in told[0]}, abs=answer.tolerance
        )
        for token_id, entry in zip(answer.token_ids, told, strict=True):
            assert list(entry) == list(dict.fromkeys((token_id, *sorted(asked.logprob_token_ids))))
            assert [each.rank for each in entry.values()] == [1, *[None] * (len(entry) - 1)]


@pytest.mark.parametrize(("name", "case"), PAIRS, ids=str)
def test_a_batch_equals_transformers_one_by_one(reference: Callable[[str], Reference], name: str, case: Case) -> None:
    check(reference(name), case, NUM_PROMPTS if name in CHECKPOINTS else FEW_PROMPTS)
