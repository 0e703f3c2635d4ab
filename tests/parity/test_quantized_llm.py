"""`LLM` on the bundled model in few bits: answers that are right, and logprobs near those of the model as it is."""

from pathlib import Path

import pytest

from penstock import LLM, SamplingParams
from tools.bundled_model.evaluate import held_out_prompts
from tools.bundled_model.grammar import on_subject, parses
from tools.bundled_model.quantize import BUNDLED, quantize_checkpoint

EXAMINED = held_out_prompts()[::5]
GREEDY = SamplingParams(temperature=0, max_tokens=300, prompt_logprobs=0)


def answers(directory: Path, quantization: str | None = None) -> tuple[float, list[float]]:
    """The share of answers that are in the language and on the subject, and the logprobs of all prompts' tokens."""
    llm = LLM(str(directory), quantization=quantization, num_blocks=1000)
    outputs = llm.chat([each.messages for each in EXAMINED], GREEDY, use_tqdm=False)  # type: ignore[misc]
    right = [
        parses(answer) and on_subject(each.turn.ask, answer)
        for each, answer in zip(EXAMINED, (output.outputs[0].text for output in outputs), strict=True)
    ]
    logprobs = [
        place[token_id].logprob
        for output in outputs
        for token_id, place in zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
        if place is not None
    ]
    return sum(right) / len(right), logprobs


@pytest.fixture(scope="module")
def as_it_is() -> tuple[float, list[float]]:
    return answers(BUNDLED)


@pytest.mark.parametrize(("format_", "near"), [("fp8", 0.1), ("awq", 0.3), (None, 0.15)])
def test_the_bundled_model_in_few_bits_answers_as_it_does_in_sixteen(
    tmp_path: Path, as_it_is: tuple[float, list[float]], format_: str | None, near: float
) -> None:
    """None: rounded to 8 bits when it is read."""
    share, logprobs = as_it_is
    if format_ is None:
        found_share, found = answers(BUNDLED, quantization="fp8")
    else:
        quantize_checkpoint(format_, tmp_path)
        found_share, found = answers(tmp_path)
    differences = [abs(one - other) for one, other in zip(found, logprobs, strict=True)]
    assert 0 < sum(differences) / len(differences) < near
    assert found_share > share - 0.1
