"""Beam search equals transformers': every width, length penalty and way to stop, whether outputs end or not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
import torch
from cases import CHECKPOINTS, covering
from reference import Reference
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock import LLM, BeamSearchParams, SamplingParams

MAX_TOKENS = 12
NUM_BLOCKS = (240, 34)
SEARCHES = list(product((1, 2, 3, 5), (-1.0, 0.0, 0.6, 1.0, 2.0), (False, True, "never")))
# What `generate` takes beside beams it takes of one, too: there it changes nothing, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def searches_of(name: str, num_blocks: int) -> list[tuple[int, float, bool | str]]:
    """Those of `SEARCHES` that a checkpoint has: any two values of any two parameters meet."""
    return covering(SEARCHES, num_blocks + CHECKPOINTS.index(name))


def test_every_search_is_some_checkpoints() -> None:
    assert {each for name, blocks in product(CHECKPOINTS, NUM_BLOCKS) for each in searches_of(name, blocks)} == set(
        SEARCHES
    )


def searched(
    model: PreTrainedModel, prompt: list[int], params: SamplingParams, end: int | None = None
) -> tuple[list[list[int]], list[float]]:
    """The outputs of transformers, best first, each up to its end token, and the sums of their logprobs."""
    ids = torch.tensor([prompt])
    settings = {"length_penalty": params.length_penalty, "early_stopping": params.early_stopping}
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=params.n,
        num_return_sequences=params.n,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        eos_token_id=end,
        pad_token_id=0,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **(settings if params.n > 1 else {}),
    )
    rows = [row[len(prompt) :] for row in found.sequences.tolist()]
    outputs = [row[: row.index(end) + 1 if end in row else MAX_TOKENS] for row in rows]
    if params.n == 1:  # greedy search has no scores of its own
        steps = zip(found.logits, outputs[0], strict=False)
        return outputs, [sum(logits.log_softmax(-1)[0, token_id].item() for logits, token_id in steps)]
    scores = found.sequences_scores.tolist()
    return outputs, [score * len(row) ** params.length_penalty for score, row in zip(scores, outputs, strict=True)]


@contextmanager
def engine(reference: Reference, **settings: object) -> Iterator[tuple[LLM, PreTrainedModel]]:
    model = AutoModelForCausalLM.from_pretrained(reference.directory, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    limits = {"block_size": 4, "num_blocks": 240, "max_model_len": 64, "max_num_seqs": 24, **settings}
    llm = LLM(str(reference.directory), dtype="float32", **limits)  # type: ignore[arg-type]
    try:
        yield llm, model
    finally:
        llm.llm_engine.close()


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("num_blocks", NUM_BLOCKS, ids=["room", "few blocks"])
def test_outputs_and_their_order_are_those_of_transformers(
    reference: Callable[[str], Reference], name: str, num_blocks: int
) -> None:
    rng = np.random.default_rng(5)
    with engine(reference(name), num_blocks=num_blocks) as (llm, model):
        prompts, params, wanted = [], [], []
        for index, (width, penalty, early) in enumerate(searches_of(name, num_blocks)):
            prompt = rng.integers(3, model.config.vocab_size, int(rng.integers(1, 20))).tolist()
            common = SamplingParams(
                n=width,
                temperature=0,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                use_beam_search=True,
                length_penalty=penalty,
                early_stopping=early,
                min_tokens=3 * (index % 2),
            )
            # An end that comes: the fourth token of the best output.
            end = searched(model, prompt, common)[0][0][3]
            prompts.append(prompt)
            wanted.append(searched(model, prompt, common, end))
            params.append(SamplingParams(**{**_fields(common), "stop_token_ids": [end]}))
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [[sample.token_ids for sample in output.outputs] for output in outputs] == [each for each, _ in wanted]
        for output, (_, sums) in zip(outputs, wanted, strict=True):
            assert [sample.cumulative_logprob for sample in output.outputs] == pytest.approx(sums, abs=2e-3)
        reasons = {sample.finish_reason for output in outputs for sample in output.outputs}
        assert reasons == {"stop", "length"}


def _fields(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def test_the_method_of_vllm_tells_prompts_with_their_outputs(reference: Callable[[str], Reference]) -> None:
    with engine(reference(CHECKPOINTS[0])) as (llm, model):
        params = BeamSearchParams(beam_width=3, max_tokens=MAX_TOKENS, ignore_eos=True)
        (found,) = llm.beam_search([{"prompt_token_ids": [5, 6, 7]}], params)
        wanted, sums = searched(model, [5, 6, 7], params.sampling_params())
        assert [each.tokens for each in found.sequences] == [[5, 6, 7, *output] for output in wanted]
        decode = llm.llm_engine.prompt_tokenizer.decode
        assert found.sequences[0].text == decode([5, 6, 7, *wanted[0]], skip_special_tokens=False)
        assert {each.finish_reason for each in found.sequences} == {"length"}
        assert [each.cum_logprob for each in found.sequences] == pytest.approx(sums, abs=2e-3)
        for each, output in zip(found.sequences, wanted, strict=True):
            assert [next(iter(entry)) for entry in each.logprobs] == output
            told = [entry.logprob for entries in each.logprobs for entry in entries.values()]
            assert sum(told) == pytest.approx(each.cum_logprob)
