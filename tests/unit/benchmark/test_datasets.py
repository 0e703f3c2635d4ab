"""The requests of a benchmark: as many, as long and the same again."""

import argparse
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from contract.domain.errors import PenstockError
from penstock.benchmark.datasets import Sample, add_dataset, make_samples, tokenizer_of
from penstock.launcher.layout import BUNDLED_MODEL


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of(str(BUNDLED_MODEL))()


def samples(tokenizer: Tokenizer, *flags: str) -> list[Sample]:
    parser = argparse.ArgumentParser()
    add_dataset(parser)
    return make_samples(parser.parse_args(flags), lambda: tokenizer)


def test_random_prompts_have_the_lengths_that_are_asked_for(tokenizer: Tokenizer) -> None:
    found = samples(tokenizer, "--num-prompts=7", "--random-input-len=50", "--random-output-len=9", "--prompts-as-ids")
    assert [(len(each.prompt), each.output_len) for each in found] == [(50, 9)] * 7
    assert len({tuple(each.prompt) for each in found}) == 7


def test_a_text_has_about_as_many_tokens_and_no_special_ones(tokenizer: Tokenizer) -> None:
    special = {each.content for each in tokenizer.get_added_tokens_decoder().values() if each.special}
    for each in samples(tokenizer, "--num-prompts=20", "--random-input-len=200"):
        assert isinstance(each.prompt, str)
        assert 180 <= len(tokenizer.encode(each.prompt, add_special_tokens=False).ids) <= 220
        assert not any(token in each.prompt for token in special)


def test_lengths_vary_within_the_range_and_both_ways(tokenizer: Tokenizer) -> None:
    flags = ("--num-prompts=200", "--random-input-len=100", "--random-output-len=10", "--random-range-ratio=0.2")
    found = samples(tokenizer, *flags, "--prompts-as-ids")
    inputs, outputs = {len(each.prompt) for each in found}, {each.output_len for each in found}
    assert (min(inputs), max(inputs), outputs) == (80, 120, {8, 9, 10, 11, 12})


def test_the_same_seed_gives_the_same_requests(tokenizer: Tokenizer) -> None:
    first, again, other = (samples(tokenizer, "--num-prompts=3", f"--seed={seed}") for seed in (1, 1, 2))
    assert first == again != other


def test_prefixes_are_shared_in_turns(tokenizer: Tokenizer) -> None:
    flags = ["--dataset-name=prefix_repetition", "--num-prompts=6", "--prompts-as-ids"]
    flags += ["--prefix-repetition-num-prefixes=2", "--prefix-repetition-prefix-len=30"]
    found = [tuple(each.prompt) for each in samples(tokenizer, *flags, "--prefix-repetition-suffix-len=5")]
    assert {len(each) for each in found} == {35}
    assert len({each[:30] for each in found}) == 2
    assert len({each[30:] for each in found}) == 6
    assert found[0][:30] == found[2][:30] != found[1][:30]


def test_a_file_of_conversations_gives_first_questions_as_long_as_their_answers(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "sharegpt.json"
    asked, answer = "Tell me of the fox and the river.", "The fox went over the river and found a shell."
    turns = [{"from": "human", "value": asked}, {"from": "gpt", "value": answer}]
    others = [[turns[0]], [{"value": "a"}, {"value": "b"}], [{"value": "fox " * 3000}, turns[1]]]
    path.write_text(json.dumps([{"conversations": each} for each in (*others, turns)]))
    flags = ("--dataset-name=sharegpt", f"--dataset-path={path}")
    num_answered = len(tokenizer.encode(answer, add_special_tokens=False).ids)
    assert samples(tokenizer, *flags, "--num-prompts=1") == [Sample(asked, num_answered)]
    assert samples(tokenizer, *flags, "--num-prompts=1", "--sharegpt-output-len=7") == [Sample(asked, 7)]
    with pytest.raises(PenstockError, match="1 conversations of a fitting length"):
        samples(tokenizer, *flags, "--num-prompts=2")


@pytest.mark.parametrize("content", ["{", '[{"conversations": [1, 2]}]', "3"])
def test_a_file_that_is_none_is_told_so(tokenizer: Tokenizer, tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(PenstockError, match="as ShareGPT"):
        samples(tokenizer, "--dataset-name=sharegpt", f"--dataset-path={path}")
