"""Many prompts at once through an engine in this process, until all have ended."""

from collections.abc import Sequence

from contract.domain.errors import invalid
from contract.domain.params import SamplingParams
from contract.domain.pooling import Pooling, PoolingFacts, PoolingParams
from contract.domain.request import Prompt
from penstock.engine import LLMEngine
from penstock.outputs import RequestOutput
from penstock.progress import ProgressBar
from penstock.prompts import PromptLike, as_list, at_index, pair_each, parse_prompt


class Batches:
    """One call's prompts after the other's."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._num_requests = 0

    def pool(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        truncate_prompt_tokens: int | None,
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Make vectors of prompts; outputs come in the order of the prompts.

        Args:
            prompts: as `LLM.generate` takes them.
            pooling_params: one for all or one for each; None: as the checkpoint says.
            truncate_prompt_tokens: the last so many tokens of each prompt count, where its parameters do not say it.
            use_tqdm: whether a bar shows the progress.

        Raises:
            PenstockError: a prompt or a parameter is wrong, naming its index.
        """
        parsed = []
        for index, value in enumerate(as_list(prompts)):
            with at_index("prompts", index):
                parsed.append(parse_prompt(value))
        wanted = pair_each(PoolingParams() if pooling_params is None else pooling_params, PoolingParams, len(parsed))
        facts = self._engine.vocabulary.pooling
        asked = [pooled(facts, each, truncate_prompt_tokens) for each in wanted]
        params, poolings = [each for each, _ in asked], [each for _, each in asked]
        return self.run(parsed, params, None, use_tqdm=use_tqdm, poolings=poolings)

    def score(
        self,
        pairs: list[Prompt],
        pooling_params: PoolingParams | None,
        truncate_prompt_tokens: int | None,
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Score pairs of texts by a cross-encoder; raises and returns as `pool`."""
        facts, wanted = self._engine.vocabulary.pooling, pooling_params or PoolingParams()
        params, scoring = pooled(facts, wanted, truncate_prompt_tokens, scores_pairs=True)
        return self.run(pairs, params, None, use_tqdm=use_tqdm, poolings=[scoring] * len(pairs))

    def run(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        *,
        use_tqdm: bool,
        poolings: Sequence[Pooling] = (),
    ) -> list[RequestOutput]:
        """Take prompts to their ends; outputs come in the order of the prompts.

        Args:
            prompts: as they were parsed.
            sampling_params: one for all or one for each; None: the model's defaults.
            priority: of each; None: all alike.
            use_tqdm: whether a bar shows the progress.
            poolings: the way of each prompt to its vector; none: they are answered.

        Raises:
            PenstockError: a prompt or a parameter is wrong, naming its index.
        """
        if sampling_params is None:
            sampling_params = self._engine.vocabulary.defaults.params()
        params = pair_each(sampling_params, SamplingParams, len(prompts))
        priorities = [0] * len(prompts) if priority is None else list(priority)
        if len(priorities) != len(prompts):
            raise invalid(f"{len(priorities)} priorities came with {len(prompts)} prompts", "priority")
        pending: dict[str, int] = {}
        outputs: dict[int, RequestOutput] = {}
        try:
            for index, prompt in enumerate(prompts):
                request_id = str(self._num_requests)
                self._num_requests += 1
                with at_index("prompts", index):
                    self._engine.add_request(
                        request_id,
                        prompt,
                        params[index],
                        priorities[index],
                        clips=True,
                        pooling=poolings[index] if poolings else None,
                    )
                pending[request_id] = index
                if priority is None:
                    self._engine.begin()
            with ProgressBar(self._engine.progress, len(prompts), disable=not use_tqdm) as bar:
                while pending:
                    finished = [output for output in self._engine.step() if output.finished]
                    for output in finished:
                        # An output of an earlier call that was given up belongs to nobody.
                        index = pending.pop(output.request_id, -1)
                        if index >= 0:
                            with at_index("prompts", index):
                                outputs[index] = _succeeded(output)
                    bar.show(len(outputs))
        finally:
            # After an error or Ctrl-C: what is left of this call must not run on in the next one.
            for request_id in pending:
                self._engine.abort_request(request_id)
        return [outputs[index] for index in range(len(prompts))]


def pooled(
    facts: PoolingFacts, params: PoolingParams, truncate_prompt_tokens: int | None, *, scores_pairs: bool = False
) -> tuple[SamplingParams, Pooling]:
    """The way in which a prompt becomes a vector, in the words of requests.

    Args:
        facts: of the checkpoint.
        params: as they are asked for.
        truncate_prompt_tokens: where they do not say it.
        scores_pairs: it is a pair of texts, and becomes a score.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED naming the parameter.
    """
    cut = truncate_prompt_tokens if params.truncate_prompt_tokens is None else params.truncate_prompt_tokens
    sampling = SamplingParams(
        temperature=0.0, max_tokens=1, truncate_prompt_tokens=cut, truncation_side=params.truncation_side
    )
    return sampling, (facts.scoring if scores_pairs else facts.pooling)(params)


def _succeeded(output: RequestOutput) -> RequestOutput:
    if output.error is not None:
        raise output.error.raised()
    return output
