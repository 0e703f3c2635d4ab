"""Pairs of texts become the tokens, and types of tokens, that transformers makes of them."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import SamplingParams
from contract.domain.pooling import SCORED
from contract.domain.request import Header, Prompt, Request
from tokenizer_svc.core.pairs import longest_first
from tokenizer_svc.core.tokenize import PromptTokenizer
from tokenizer_svc.loading import load_vocabulary

WORDS = ["a", "b", "c", "d", "e", "f", "g"]
CLS, SEP = ("[CLS]", 1), ("[SEP]", 2)
CONTEXT = 16
PROCESSORS = {
    "bert": processors.BertProcessing(SEP, CLS),
    "roberta": processors.RobertaProcessing(SEP, CLS, trim_offsets=True, add_prefix_space=False),
    "template": processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[CLS, SEP]
    ),
}
STRANGE = processors.TemplateProcessing(single="$A", pair="$A:1 [SEP]:2 $B:0", special_tokens=[SEP])


def made(processor: Any) -> Tokenizer:
    words = {"[PAD]": 0, **dict([CLS, SEP]), **{word: 3 + at for at, word in enumerate(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(words, "a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("[PAD]", "[CLS]", "[SEP]")])
    tokenizer.post_processor = processor
    return tokenizer


def prompts_of(tokenizer: Tokenizer, directory: Path) -> PromptTokenizer:
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"architectures": ["XForSequenceClassification"], "vocab_size": 10, "max_position_embeddings": CONTEXT}
    (directory / "config.json").write_text(json.dumps(config))
    return PromptTokenizer(load_vocabulary(str(directory)))


def request(pair: tuple[str, str], **params: Any) -> Request:
    header, asked = Header(b"r" * 16, "", 0, 0, 0, "", 0), SamplingParams(max_tokens=1, **params)
    return Request(header, "", Prompt(pair=pair), asked, pooling=SCORED)


PAIRS = [("a b c", "d e"), ("a", "b c d e f g a b"), ("", "a b"), ("a b c d e f", "g")]


@pytest.mark.parametrize(("name", "pair"), list(product(PROCESSORS, PAIRS)))
@pytest.mark.parametrize("most", [None, 5, 6, 7, 8, 9])
@pytest.mark.parametrize("side", ["left", "right"])
def test_they_are_those_of_transformers(
    name: str, pair: tuple[str, str], most: int | None, side: str, tmp_path: Path
) -> None:
    tokenizer = made(PROCESSORS[name])
    wanted = PreTrainedTokenizerFast(tokenizer_object=tokenizer, truncation_side=side)(
        [pair[0]], [pair[1]], truncation="longest_first" if most else False, max_length=most, return_token_type_ids=True
    )
    found = prompts_of(made(PROCESSORS[name]), tmp_path).tokenize(
        request(pair, truncate_prompt_tokens=most, truncation_side=side)
    )
    assert found.token_ids.tolist() == wanted["input_ids"][0]
    size = len(wanted["input_ids"][0])
    num_first = found.num_first_tokens or size
    assert [0] * num_first + [1] * (size - num_first) == wanted["token_type_ids"][0]


def test_a_pair_beyond_the_context_is_refused_or_cut_to_it(tmp_path: Path) -> None:
    prompts = prompts_of(made(PROCESSORS["bert"]), tmp_path)
    pair = ("a " * 9, "b " * 9)
    with pytest.raises(PenstockError, match=f"maximum context length is {CONTEXT} tokens") as caught:
        prompts.tokenize(request(pair))
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert len(prompts.tokenize(request(pair, truncate_prompt_tokens=-1)).token_ids) == CONTEXT
    with pytest.raises(PenstockError, match="leaves no room for a pair"):
        prompts.tokenize(request(pair, truncate_prompt_tokens=2))


def test_other_types_of_tokens_are_refused_by_name(tmp_path: Path) -> None:
    prompts = prompts_of(made(STRANGE), tmp_path)
    with pytest.raises(PenstockError, match="types the tokens of pairs is not implemented"):
        prompts.tokenize(request(("a", "b")))


def test_half_of_a_character_is_refused(tmp_path: Path) -> None:
    prompts = prompts_of(made(PROCESSORS["bert"]), tmp_path)
    with pytest.raises(PenstockError, match="not valid Unicode"):
        prompts.tokenize(request(("a", "\ud800")))


def test_a_prompt_is_a_pair_or_something_else(tmp_path: Path) -> None:
    prompts = prompts_of(made(PROCESSORS["bert"]), tmp_path)
    assert prompts.tokenize(request(("a", "b"))).num_first_tokens == 3
    assert prompts.vocabulary.pooling.scores_pairs


@pytest.mark.parametrize(("first", "second", "left"), list(product(range(5), range(5), range(9))))
def test_the_longer_text_gives_up_its_tokens(first: int, second: int, left: int) -> None:
    kept = longest_first(first, second, left)
    assert sum(kept) == min(first + second, left)
    assert kept[0] <= first
    assert kept[1] <= second
    if sum(kept) < first + second and first != second:
        cut = [whole - part for whole, part in zip((first, second), kept, strict=True)]
        longer = 0 if first > second else 1
        assert cut[longer] >= cut[1 - longer]
        assert abs(kept[0] - kept[1]) <= 1 or cut[1 - longer] == 0
