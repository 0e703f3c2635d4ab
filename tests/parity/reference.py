"""What transformers says: greedy tokens and top-5 logprobs of 32 prompts, one by one, once for each checkpoint."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from byte_tokenizer import write_tokenizer
from checkpoints import VARIANTS, save_checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

import penstock
from contract.domain.params import SamplingParams
from penstock.outputs import Logprob

BUNDLED = "bundled"
NUM_PROMPTS = 32
MAX_TOKENS = 8
NUM_TOP = 5
# Rounding moves logits by some 1e-6. A prompt that leads to a gap as small as that is drawn anew, so that what is
# compared exactly does not hang on rounding.
MIN_GREEDY_GAP = 1e-3
# Of logprobs, and of those that stand next to each other. A state adds up what rounding did to all tokens before: on
# an AMD EPYC, of Qwen3.5, transformers was 9.4e-5 off what it gives in double precision and we 6.5e-5, 1.3e-4 from each
# other. Both may be 1e-4 off.
TOLERANCE, TOLERANCE_OF_STATES = 1e-4, 2e-4

# Every other prompt asks for its own logprobs too: the others find what such ones leave in the prefix cache.
PROMPT_PARAMS = SamplingParams(
    temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP
)
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=NUM_TOP)


@dataclass(frozen=True)
class Answer:
    """A prompt and what must come out."""

    prompt: list[int]
    token_ids: list[int]  # greedy
    top_ids: list[list[int]]  # per token, the most likely first
    top_logprobs: list[list[float]]
    prompt_logprobs: torch.Tensor  # f32[prompt tokens but the first, vocab_size]
    tolerance: float  # of a logprob


@dataclass(frozen=True)
class Reference:
    """A checkpoint and its answers, each of which is computed when it is first asked for."""

    directory: Path
    model: PreTrainedModel
    _found: list[Answer] = field(default_factory=list, init=False)

    @property
    def answers(self) -> list[Answer]:
        """Those of `answers_of`."""
        return self.first(NUM_PROMPTS)

    def first(self, count: int) -> list[Answer]:
        """The first of them."""
        self._found.extend(islice(self._coming, max(0, count - len(self._found))))
        return self._found[:count]

    @cached_property
    def _coming(self) -> Iterator[Answer]:
        return answers_of(self.model)


def make_reference(name: str, directory: Path) -> Reference:
    """The bundled model, or a variant of `checkpoints` that is saved into `directory`, with its answers."""
    if name == BUNDLED:
        directory = Path(penstock.__file__).parent / "bundled_model"
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    else:
        (variant,) = (variant for variant in VARIANTS if variant.name == name)
        model = save_checkpoint(directory, variant)
        write_tokenizer(directory)
    return Reference(directory, model)


def answers_of(model: PreTrainedModel) -> Iterator[Answer]:
    """Of 32 prompts of 1 to 300 tokens, a third of them with beginnings that they share with others."""
    rng = np.random.default_rng(11)
    lengths = [1, 2, 15, 16, 17, 300, *rng.integers(1, 301, NUM_PROMPTS - 6).tolist()]
    answers: list[Answer] = []
    for index, length in enumerate(lengths):
        answer = None
        while answer is None:
            prompt = rng.integers(3, model.config.vocab_size, length).tolist()
            if index % 3 == 2:
                shared = answers[5].prompt[: max(0, length - 5)] if index > 5 else []
                prompt[: len(shared)] = shared
            answer = _answer(model, prompt)
        answers.append(answer)
        yield answer


@torch.inference_mode()
def _answer(model: PreTrainedModel, prompt: list[int]) -> Answer | None:
    """None if the answer hangs on a near-tie."""
    token_ids: list[int] = []
    top_ids: list[list[int]] = []
    top_logprobs: list[list[float]] = []
    fed, cache = torch.tensor([prompt]), None
    of_prompt, tolerance = torch.empty(0), _tolerance_of(model)
    for _ in range(MAX_TOKENS):
        output = model(fed, past_key_values=cache, use_cache=True)
        if cache is None:
            of_prompt = output.logits[0, :-1].float().log_softmax(-1)
        cache = output.past_key_values
        values, ids = output.logits[0, -1].float().log_softmax(-1).topk(NUM_TOP + 1)
        gaps = values[:-1] - values[1:]
        if gaps[0] < MIN_GREEDY_GAP or gaps.min() < tolerance:
            return None
        token_ids.append(int(ids[0]))
        top_ids.append(ids[:NUM_TOP].tolist())
        top_logprobs.append(values[:NUM_TOP].tolist())
        fed = ids[:1].unsqueeze(0)
    return Answer(prompt, token_ids, top_ids, top_logprobs, of_prompt, tolerance)


def _tolerance_of(model: PreTrainedModel) -> float:
    has_state = "linear_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or [])
    return TOLERANCE_OF_STATES if has_state else TOLERANCE


def params_of(index: int) -> SamplingParams:
    """The parameters of the prompt with this index."""
    return PROMPT_PARAMS if index % 2 else PARAMS


def assert_prompt_equal(index: int, answer: Answer, told: Sequence[dict[int, Logprob] | None] | None) -> None:
    """The prompt's logprobs within the answer's tolerance, if it asked for them; ranks up to near-ties."""
    if not index % 2:
        assert told is None
        return
    assert told is not None
    assert told[0] is None
    places = [entry or {} for entry in told[1:]]
    assert [next(iter(entry), None) for entry in places] == answer.prompt[1:]
    assert {len(entry) for entry in places} <= {NUM_TOP, NUM_TOP + 1}
    if not places:
        return
    expected = answer.prompt_logprobs.numpy()
    at = np.repeat(np.arange(len(places)), [len(entry) for entry in places])
    right = expected[at, [token_id for entry in places for token_id in entry]]
    entries = [each for entry in places for each in entry.values()]
    np.testing.assert_allclose([each.logprob for each in entries], right, rtol=0, atol=answer.tolerance)
    ranks = [each.rank or 0 for each in entries]
    above, below = ((expected[at] > (right + gap)[:, None]).sum(1) for gap in (answer.tolerance, -answer.tolerance))
    np.testing.assert_array_less(above, ranks)
    np.testing.assert_array_less(ranks, below + 1)
    best = [[logprob for _, logprob in likeliest(entry, NUM_TOP)] for entry in places]
    np.testing.assert_allclose(best, np.sort(expected)[:, : -NUM_TOP - 1 : -1], rtol=0, atol=answer.tolerance)


def likeliest(told: dict[int, Logprob], count: int) -> list[tuple[int, float]]:
    """The most likely tokens at one place, without the sampled one where that is none of them."""
    ranked = sorted(told.items(), key=lambda each: each[1].rank or 0)
    return [(token_id, each.logprob) for token_id, each in ranked[:count]]


def assert_equal(answer: Answer, token_ids: list[int], logprobs: Sequence[dict[int, Logprob]]) -> None:
    """Token for token the same, top-5 logprobs within the answer's tolerance."""
    assert token_ids == answer.token_ids
    assert [next(iter(told)) for told in logprobs] == answer.token_ids
    tops = [likeliest(told, NUM_TOP) for told in logprobs]
    assert [[each.rank for each in told.values()] for told in logprobs] == [[*range(1, NUM_TOP + 1)]] * len(tops)
    assert [[token_id for token_id, _ in top] for top in tops] == answer.top_ids
    found = [[logprob for _, logprob in top] for top in tops]
    np.testing.assert_allclose(found, answer.top_logprobs, rtol=0, atol=answer.tolerance)
