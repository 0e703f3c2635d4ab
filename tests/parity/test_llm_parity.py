"""`LLM` against transformers: 32 prompts at once equal 32 prompts one by one, whatever is switched on."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
from checkpoints import VARIANTS, save_checkpoint
from recorder import Recorder
from reference import NUM_PROMPTS, PARAMS, Reference, assert_equal, make_reference, write_tokenizer

from penstock import LLM

BLOCK_SIZE = 4
FEW_BLOCKS = 84  # the longest prompt and its output need 77
MANY_BLOCKS = 2048
FULL_PRODUCT = ("llama_llama3_rope_tied", "llama_biases", "qwen2_tied", "qwen3_biases")


@dataclass(frozen=True)
class Case:
    window: int
    budget: int
    enable_prefix_caching: bool
    num_blocks: int

    def __str__(self) -> str:
        cached = "cached" if self.enable_prefix_caching else "uncached"
        return f"w{self.window}-{self.budget}-{cached}-{self.num_blocks}"


CASES = [Case(*values) for values in product((1, 2, 4), (16, 512), (True, False), (FEW_BLOCKS, MANY_BLOCKS))]
EXTREMES = [Case(2, 16, True, FEW_BLOCKS), Case(4, 512, False, FEW_BLOCKS)]
PAIRS = [(name, case) for name in FULL_PRODUCT for case in CASES] + [
    (variant.name, case) for variant in VARIANTS if variant.name not in FULL_PRODUCT for case in EXTREMES
]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Made once for each checkpoint."""
    variants = {variant.name: variant for variant in VARIANTS}

    @cache
    def make(name: str) -> Reference:
        directory = tmp_path_factory.mktemp(name)
        model = save_checkpoint(directory, variants[name])
        write_tokenizer(directory)
        return make_reference(directory, model)

    return make


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
        window=case.window,
    )
    recorder = llm.llm_engine.runner = Recorder(llm.llm_engine.runner)
    outputs = llm.generate([answer.prompt for answer in reference.answers], PARAMS, use_tqdm=False)
    for answer, output in zip(reference.answers, outputs, strict=True):
        assert_equal(answer, output.outputs[0].token_ids, output.outputs[0].logprobs or [])
    counters = llm.llm_engine.stats().counters
    assert recorder.most_in_flight == case.window
    assert 16 < recorder.most_batched_tokens <= 512 if case.budget == 512 else recorder.most_batched_tokens == 16
    # A pool of few blocks holds fewer tokens than the large budget, which then cuts nothing.
    assert (recorder.num_chunks > recorder.num_admissions) == (case.budget == 16 or case.num_blocks == MANY_BLOCKS)
    assert (counters.num_preemptions > 0) == (case.num_blocks == FEW_BLOCKS)
    assert (counters.num_cached_tokens > 0) == case.enable_prefix_caching
    assert sum(output.num_cached_tokens for output in outputs) == counters.num_cached_tokens


@pytest.mark.parametrize(("name", "case"), PAIRS, ids=str)
def test_a_batch_equals_transformers_one_by_one(reference: Callable[[str], Reference], name: str, case: Case) -> None:
    check(reference(name), case)
