"""A generation_config.json holds where a request does not say otherwise."""

from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import write_checkpoint

from contract.domain.errors import ErrorCode, Fault, PenstockError
from contract.domain.generation_defaults import OPENAI_DEFAULTS, GenerationDefaults
from contract.domain.params import SamplingParams
from contract.domain.request import Header, Prompt, Request
from tokenizer_svc.core.tokenize import PromptTokenizer
from tokenizer_svc.core.vocabulary import Vocabulary
from tokenizer_svc.loading import load_vocabulary

HEADER = Header(b"r" * 16, "", 0, 0, 0, "", 1)
STATED = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2048,
    "suppress_tokens": [7, 5, 5, 4000, -1],
    "eos_token_id": [1, 3],
    "do_sample": True,
}


def load(path: Path, config: Any, choice: str = "model") -> Vocabulary:
    return load_vocabulary(str(write_checkpoint(path, generation_config=config)), generation_config=choice)


def test_the_models_own_file_holds(tmp_path: Path) -> None:
    vocabulary = load(tmp_path, STATED)
    # Of a token beyond the model's 310 there are no logits.
    assert vocabulary.defaults == GenerationDefaults(
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        min_p=0.05,
        repetition_penalty=1.05,
        max_tokens=2048,
        suppress_tokens=(5, 7),
    )
    assert vocabulary.defaults_not_done == ()


@pytest.mark.parametrize("config", [None, {}, {"eos_token_id": 1}, {"temperature": None, "suppress_tokens": None}])
def test_what_the_file_does_not_say_is_openais(tmp_path: Path, config: Any) -> None:
    defaults = load(tmp_path, config).defaults
    assert defaults == OPENAI_DEFAULTS
    assert defaults.params() == SamplingParams()


def test_do_sample_says_nothing_as_the_temperature_says_it(tmp_path: Path) -> None:
    assert load(tmp_path, {"do_sample": False, "max_new_tokens": 9}).defaults == GenerationDefaults(max_tokens=9)


@pytest.mark.parametrize("choice", ["openai", "vllm"])
def test_an_operator_may_want_none_of_it_but_for_eos(tmp_path: Path, choice: str) -> None:
    vocabulary = load(tmp_path, STATED, choice)
    assert (vocabulary.defaults, vocabulary.eos_token_ids) == (OPENAI_DEFAULTS, (1, 3))


def test_an_operator_may_give_a_directory_with_another_file(tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_checkpoint(other, generation_config={"temperature": 0.1})
    vocabulary = load(tmp_path / "model", STATED, str(other))
    assert (vocabulary.defaults, vocabulary.eos_token_ids) == (GenerationDefaults(temperature=0.1), (1, 3))
    write_checkpoint(other, generation_config={"eos_token_id": 2})
    assert load(tmp_path / "model", STATED, str(other)).eos_token_ids == (2, 3)


def test_a_directory_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="--generation-config is model, openai or a directory with") as refused:
        load(tmp_path, STATED, str(tmp_path / "nowhere"))
    assert refused.value.fault is Fault.OPERATOR


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"temperature": -1}, "temperature must be in"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_p": 0}, "top_p must be in"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"max_new_tokens": 0}, "max_tokens must be an integer"),
        ({"suppress_tokens": 3}, "suppress_tokens must be a list of token ids"),
        ({"suppress_tokens": list(range(310))}, "suppress_tokens leaves no token"),
    ],
)
def test_a_file_that_cannot_hold_is_refused_with_what_to_do(tmp_path: Path, config: Any, words: str) -> None:
    with pytest.raises(PenstockError, match=words) as refused:
        load(tmp_path, config)
    assert refused.value.fault is Fault.OPERATOR
    assert "set --generation-config to openai" in refused.value.message


def test_what_it_asks_for_and_nothing_does_is_told(tmp_path: Path) -> None:
    config = {"num_beams": 4, "typical_p": 1.0, "begin_suppress_tokens": [5], "bad_words_ids": [], "min_length": 0}
    assert load(tmp_path, config).defaults_not_done == ("num_beams", "begin_suppress_tokens")


@pytest.mark.parametrize("top_k", [0, -1])
def test_both_ways_to_keep_all_tokens_are_one(tmp_path: Path, top_k: int) -> None:
    assert load(tmp_path, {"top_k": top_k}).defaults.stated["top_k"] == 0


def test_a_bound_that_nobody_asked_for_is_what_the_context_leaves(tmp_path: Path) -> None:
    prompts = PromptTokenizer(load(tmp_path, {}))
    request = Request(HEADER, "", Prompt(token_ids=(5,) * 60), SamplingParams(max_tokens=16))
    with pytest.raises(PenstockError) as refused:
        prompts.tokenize(request)
    assert refused.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    left = Request(HEADER, "", request.prompt, request.params, unsaid=frozenset({"max_tokens"}))
    assert prompts.tokenize(left).stopping.max_tokens == 4


def test_tokens_that_are_suppressed_are_the_models_and_leave_others(tmp_path: Path) -> None:
    prompts = PromptTokenizer(load(tmp_path, {}))
    for suppressed, words in (((310,), "token 310 is outside"), (tuple(range(310)), "leaves no token")):
        with pytest.raises(PenstockError, match=words) as refused:
            prompts.tokenize(Request(HEADER, "", Prompt(text="a"), SamplingParams(suppress_tokens=suppressed)))
        assert refused.value.param == "suppress_tokens"
