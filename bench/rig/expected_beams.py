"""The outputs of a beam search with the simulated runner, computed without a pipeline: what is compared with."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from contract.domain.params import Sampling, SamplingParams
from scheduler_svc.core.beams import BEGUN, BeamRules, Found, Hypothesis, advance, choose, outcome
from worker_svc.core.interface import Limits
from worker_svc.core.pretended_model import expected_tokens, likeliest

_GREEDY = Sampling(temperature=0.0)


def expected_beams(
    prompt_ids: tuple[int, ...], params: SamplingParams, limits: Limits, eos_every: int = 0, model_seed: int = 0
) -> list[list[int]]:
    """The tokens of each output, best first; `limits` say the vocabulary and its end tokens."""
    return [each.token_ids.tolist() for each in expected_outputs(prompt_ids, params, limits, eos_every, model_seed)]


@lru_cache(256)
def expected_outputs(
    prompt_ids: tuple[int, ...], params: SamplingParams, limits: Limits, eos_every: int = 0, model_seed: int = 0
) -> tuple[Hypothesis, ...]:
    """The outputs, best first, with the logprobs of their tokens."""
    search = params.beams
    assert search is not None
    stops = (*(params.stop_token_ids or ()), *(() if params.ignore_eos else limits.eos_token_ids))
    rules = BeamRules.of(params.n, search, params.stopping, stops)
    beams = BEGUN
    while True:
        nexts = [_next(prompt_ids, beam.token_ids, limits, eos_every, model_seed) for beam in beams.running]
        found = [Found(*likeliest(token_id, rules.num_candidates, limits.vocab_size)) for token_id in nexts]
        beams = advance(rules, beams, choose(rules, beams, found))
        if (hypotheses := outcome(rules, beams, rules.max_tokens)) is not None:
            return hypotheses


def _next(prompt_ids: Sequence[int], output: Sequence[int], limits: Limits, eos_every: int, model_seed: int) -> int:
    """The token that the runner samples after a prompt and an output."""
    tokens: Iterator[int] = expected_tokens(
        [*prompt_ids, *output], _GREEDY, 0, limits, eos_every=eos_every, model_seed=model_seed
    )
    return next(tokens)
