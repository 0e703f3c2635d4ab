"""Changes of logits against transformers' `generate`: the penalty of repetition, bad words, tokens that are never
sampled, and a shortest output.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import BUNDLED, Reference
from transformers import AutoModelForCausalLM, PreTrainedModel

from contract.domain.request import Header, Prompt, Request
from penstock import LLM, CompletionOutput, SamplingParams

NUM_PROMPTS, NUM_TOKENS = 8, 24


@pytest.fixture(scope="module")
def llm(reference: Callable[[str], Reference]) -> LLM:
    return LLM(str(reference(BUNDLED).directory), dtype="float32", max_num_seqs=4)


@pytest.fixture(scope="module")
def model(reference: Callable[[str], Reference]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(reference(BUNDLED).directory, dtype=torch.float32)


def words_of(llm: LLM, params: SamplingParams) -> list[list[int]]:
    """The token sequences that a tokenizer makes of bad words."""
    request = Request(Header(b"r" * 16, "", 0, 0, 0, "", 0), "m", Prompt(text="a"), params)
    return [list(word) for word in llm.llm_engine.prompt_tokenizer.tokenize(request, clips=True).made.bad_word_ids]


@pytest.fixture(scope="module")
def prompts(reference: Callable[[str], Reference]) -> list[Any]:
    return [{"prompt_token_ids": answer.prompt} for answer in reference(BUNDLED).answers[:NUM_PROMPTS]]


@pytest.fixture(scope="module")
def plain(llm: LLM, prompts: list[Any]) -> list[CompletionOutput]:
    """Outputs without any of it."""
    return [each.outputs[0] for each in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))]


def words(outputs: list[CompletionOutput]) -> list[str]:
    """Two in a row of each text."""
    return sorted({" ".join(each.text.split()[1:3]) for each in outputs if len(each.text.split()) > 3})


def tokens(outputs: list[CompletionOutput]) -> list[int]:
    return sorted({each.token_ids[2] for each in outputs if len(each.token_ids) > 2})


ASKED: dict[str, Callable[[list[CompletionOutput]], dict[str, Any]]] = {
    "a penalty": lambda _: {"repetition_penalty": 1.3},
    "a reward": lambda _: {"repetition_penalty": 0.8},
    "bad words": lambda outputs: {"bad_words": words(outputs)},
    "suppressed tokens": lambda outputs: {"suppress_tokens": tokens(outputs)},
    "a shortest output": lambda _: {"min_tokens": 12},
    "all of it": lambda outputs: {
        "repetition_penalty": 1.2, "bad_words": words(outputs), "suppress_tokens": tokens(outputs)[:2],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_greedy_outputs_are_those_of_transformers(
    name: str, llm: LLM, model: PreTrainedModel, prompts: list[Any], plain: list[CompletionOutput]
) -> None:
    asked = ASKED[name](plain)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, **asked)
    told: dict[str, Any] = {
        "repetition_penalty": asked.get("repetition_penalty"),
        "bad_words_ids": words_of(llm, params) if "bad_words" in asked else None,
        "suppress_tokens": asked.get("suppress_tokens"),
        "min_new_tokens": asked.get("min_tokens"),
    }
    outputs = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
    for prompt, output in zip(prompts, outputs, strict=True):
        token_ids = torch.tensor([prompt["prompt_token_ids"]])
        with torch.inference_mode():
            expected = model.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                **{key: value for key, value in told.items() if value is not None},
            )
        assert output.token_ids == expected[0, token_ids.shape[1] :].tolist()
    assert name == "a shortest output" or [each.token_ids for each in outputs] != [each.token_ids for each in plain]
