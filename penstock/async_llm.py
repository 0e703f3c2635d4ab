"""Generate with a model in this process from an event loop: the engine of `LLM` in a thread of its own."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Self

from contract.domain.params import SamplingParams
from contract.domain.pooling import Pooling, PoolingParams
from contract.domain.request import Prompt
from penstock.chat_tokenizer import ChatTokenizer
from penstock.engine_thread import EngineThread
from penstock.llm import LLM
from penstock.offline import pooled
from penstock.outputs import RequestOutput
from penstock.pooled_outputs import (
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
    pair_scores,
    scores,
)
from penstock.prompts import PromptLike, as_list, as_pairs, as_scored, at_index, pair_each


class AsyncLLM:
    """A model that answers calls of coroutines, batched as they come.

    May be used from several event loops. Its requests are computed by a thread that ends with `shutdown`, or with
    `async with`.
    """

    def __init__(self, model: str, **options: Any) -> None:
        """Load the model; the calling thread waits for that.

        Args:
            model: directory in the Hugging Face layout, or a hub id.
            options: as `LLM` takes them.

        Raises:
            PenstockError: as `LLM` does.
        """
        self._llm = LLM(model, **options)
        self._thread = EngineThread(self._llm.llm_engine)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)

    @property
    def is_running(self) -> bool:
        """Return whether it takes requests."""
        return self._thread.is_running

    def get_tokenizer(self) -> ChatTokenizer:
        """The tokenizer that prompts go through, with the model's chat templates."""
        return self._llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a call that gives none, as `LLM` has them."""
        return self._llm.get_default_sampling_params()

    def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one prompt: all of the output so far, again and again until it has finished.

        Whoever takes outputs later than they come gets the latest. Closing the iterator gives the request up.

        Args:
            prompt: text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            sampling_params: how to generate, which counts as it is; None: the model's defaults. `max_tokens` beyond the
                context are as many as it leaves.
            request_id: any text that no unfinished request has; None: one is made.
            priority: lower is served first (with `scheduling_policy="priority"` or "fair").
            timeout_s: seconds from now after which the request ends with an error; None: never.

        Raises:
            PenstockError: by the iterator: the prompt is wrong, the request failed, or the engine has ended.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return self._thread.outputs(prompt, params, request_id, priority=priority, timeout_s=timeout_s)

    async def encode(
        self,
        prompt: PromptLike,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        truncate_prompt_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Make a vector of one prompt: the iterator gives it out once. Closing it gives the request up.

        Args:
            prompt: as `generate` takes it.
            pooling_params: as `LLM.encode` takes them.
            request_id: as `generate` takes it.
            priority: as `generate` takes it.
            truncate_prompt_tokens: the last so many tokens of the prompt count, -1: as many as fit; where the
                parameters do not say it.
            timeout_s: as `generate` takes it.

        Raises:
            PenstockError: the prompt or a parameter is wrong, the request failed, or the engine has ended.
        """
        params, pooling = self._pooled(pooling_params, truncate_prompt_tokens)
        outputs = self._thread.outputs(
            prompt, params, request_id, priority=priority, timeout_s=timeout_s, pooling=pooling
        )
        async with aclosing(outputs):
            async for output in outputs:
                yield PoolingRequestOutput.of(output)

    async def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
    ) -> list[EmbeddingRequestOutput]:
        """Make vectors of prompts, at once; outputs come in the order of the prompts.

        Args:
            prompts: as `LLM.embed` takes them.
            pooling_params: as `LLM.embed` takes them.
            truncate_prompt_tokens: as `encode` takes it.
            priority: as `generate` takes it.

        Raises:
            PenstockError: a prompt or a parameter is wrong, naming its index; the others are given up.
        """
        outputs = await self._pool(as_list(prompts), pooling_params, truncate_prompt_tokens, priority)
        return [EmbeddingRequestOutput.of(each) for each in outputs]

    async def score(
        self,
        text_1: PromptLike | Sequence[PromptLike],
        text_2: PromptLike | Sequence[PromptLike],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
    ) -> list[ScoringRequestOutput]:
        """The likeness of pairs of texts, as `LLM.score` tells it.

        Args:
            text_1: one for all of `text_2`, or one for each.
            text_2: one or several.
            pooling_params: as `embed` takes them, the same for all.
            truncate_prompt_tokens: as `encode` takes it.
            priority: as `generate` takes it.

        Raises:
            PenstockError: as `embed`; INVALID_ARGUMENT: as many of one as of the other cannot be paired.
        """
        prompts, num_first = as_pairs(text_1, text_2)
        if self._llm.llm_engine.vocabulary.pooling.scores_pairs:
            pairs = as_scored(prompts, num_first)
            return pair_scores(
                await self._pool(pairs, pooling_params, truncate_prompt_tokens, priority, scores_pairs=True)
            )
        outputs = await self._pool(prompts, pooling_params, truncate_prompt_tokens, priority)
        return scores(outputs, num_first)

    async def abort(self, request_id: str) -> None:
        """End a request: its iterator gives out what it has, with the finish reason "abort". One that has ended, or
        never was, is no error.
        """
        await self._thread.abort(request_id)

    def shutdown(self) -> None:
        """End the thread and give the device's memory back; what was unfinished fails."""
        self._thread.shutdown()

    async def _pool(
        self,
        prompts: Sequence[PromptLike | Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        truncate_prompt_tokens: int | None,
        priority: int,
        *,
        scores_pairs: bool = False,
    ) -> list[RequestOutput]:
        wanted = pair_each(PoolingParams() if pooling_params is None else pooling_params, PoolingParams, len(prompts))

        async def one(index: int) -> RequestOutput:
            params, pooling = self._pooled(wanted[index], truncate_prompt_tokens, scores_pairs=scores_pairs)
            with at_index("prompts", index):
                outputs = self._thread.outputs(prompts[index], params, None, priority=priority, pooling=pooling)
                async with aclosing(outputs):
                    return await anext(outputs)

        tasks = [asyncio.ensure_future(one(index)) for index in range(len(prompts))]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _pooled(
        self, params: PoolingParams | None, truncate_prompt_tokens: int | None, *, scores_pairs: bool = False
    ) -> tuple[SamplingParams, Pooling]:
        facts = self._llm.llm_engine.vocabulary.pooling
        return pooled(facts, params or PoolingParams(), truncate_prompt_tokens, scores_pairs=scores_pairs)
