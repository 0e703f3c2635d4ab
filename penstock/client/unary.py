"""The methods of clients that get one answer: those of `Client`, and the same of `AsyncClient`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Unpack

from contract.domain.pooling import PoolingParams
from contract.v1 import status_pb2
from penstock.client import questions, vectors, vocabulary
from penstock.client.chats import TemplateOptions
from penstock.client.questions import Question, R
from penstock.client.vectors import Embedding, Ranking, Scores, VectorOptions
from penstock.client.vocabulary import Rendered
from penstock.client.wire import Chat, ParamsLike, ServedModel


class UnaryCalls(ABC):
    """The methods of a client that blocks."""

    @abstractmethod
    def _ask(self, question: Question[R]) -> R:
        """The answer."""

    def embed(
        self,
        prompt: str | Sequence[int] | None = None,
        params: PoolingParams | None = None,
        *,
        messages: Chat | None = None,
        **options: Unpack[VectorOptions],
    ) -> Embedding:
        """Makes a vector of one prompt.

        Args:
            prompt: text, or token ids; or else
            messages: a chat, each message with a `role` and a text as `content`.
            params: how; None: as the checkpoint says, else the last hidden state of length 1.
            options: those of `VectorOptions`: model, priority and so on.

        Raises:
            PenstockError: the request is wrong, was refused, or failed.
        """
        return self._ask(vectors.ask_embedding(prompt, messages, params, options))

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        params: PoolingParams | None = None,
        **options: Unpack[VectorOptions],
    ) -> Scores:
        """Tells the likeness of pairs of texts: the cosines between their vectors.

        Args:
            text_1: one for all of `text_2`, or one for each.
            text_2: one or several.
            params: as of `embed`; a length does not count.
            options: those of `VectorOptions`.

        Raises:
            PenstockError: the call is wrong, was refused, or failed.
        """
        return self._ask(vectors.ask_scores(text_1, text_2, params, options))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        params: PoolingParams | None = None,
        *,
        top_n: int = 0,
        **options: Unpack[VectorOptions],
    ) -> Ranking:
        """Tells documents by their likeness to a text, the likest first.

        Args:
            query: the text.
            documents: up to 2047.
            params: as of `score`.
            top_n: so many are told; 0: all.
            options: those of `VectorOptions`.

        Raises:
            PenstockError: the call is wrong, was refused, or failed.
        """
        return self._ask(vectors.ask_ranking(query, documents, params, top_n, options))

    def render(self, messages: Chat, params: ParamsLike = None, **options: Unpack[TemplateOptions]) -> Rendered:
        """Tells the tokens that a chat would have computed, with every check that it would pass.

        Args:
            messages: as of `Client.chat`.
            params: as of `Client.chat`.
            options: those of `TemplateOptions`: tools, chat_template_kwargs and so on.

        Raises:
            PenstockError: as the chat would fail.
        """
        return self._ask(vocabulary.ask_rendered(messages, params, **options))

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Chat | None = None,
        model: str = "",
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        """Tells the tokens that a text or a chat becomes.

        Args:
            prompt: a text; or else
            messages: a chat, rendered with the model's template.
            model: empty: the one that is served.
            add_special_tokens: the tokenizer's own; None: of a text, since a chat's template writes them.

        Raises:
            PenstockError: the call is wrong or was refused.
        """
        return self._ask(vocabulary.ask_tokens(prompt, messages, model, add_special_tokens))

    def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """Tells the text of tokens, special ones included.

        Args:
            token_ids: of the model's vocabulary.
            model: empty: the one that is served.

        Raises:
            PenstockError: the call is wrong or was refused.
        """
        return self._ask(vocabulary.ask_text(token_ids, model))

    def cancel(self, request_id: str) -> bool:
        """Cancels a request; False: there is no such request."""
        return self._ask(questions.ask_cancel(request_id))

    def models(self) -> list[ServedModel]:
        """The models that are served."""
        return self._ask(questions.ask_models())

    def pipeline(self, pool: str = "") -> status_pb2.PipelineStatus:
        """The state of the whole pipeline; of several that a gateway serves, that of `pool`, or else of the first."""
        return self._ask(questions.ask_pipeline(pool))


class AsyncUnaryCalls(ABC):
    """The methods of a client that awaits."""

    @abstractmethod
    async def _ask(self, question: Question[R]) -> R:
        """The answer."""

    async def embed(
        self,
        prompt: str | Sequence[int] | None = None,
        params: PoolingParams | None = None,
        *,
        messages: Chat | None = None,
        **options: Unpack[VectorOptions],
    ) -> Embedding:
        """As `Client.embed`."""
        return await self._ask(vectors.ask_embedding(prompt, messages, params, options))

    async def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        params: PoolingParams | None = None,
        **options: Unpack[VectorOptions],
    ) -> Scores:
        """As `Client.score`."""
        return await self._ask(vectors.ask_scores(text_1, text_2, params, options))

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        params: PoolingParams | None = None,
        *,
        top_n: int = 0,
        **options: Unpack[VectorOptions],
    ) -> Ranking:
        """As `Client.rerank`."""
        return await self._ask(vectors.ask_ranking(query, documents, params, top_n, options))

    async def render(self, messages: Chat, params: ParamsLike = None, **options: Unpack[TemplateOptions]) -> Rendered:
        """As `Client.render`."""
        return await self._ask(vocabulary.ask_rendered(messages, params, **options))

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Chat | None = None,
        model: str = "",
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        """As `Client.tokenize`."""
        return await self._ask(vocabulary.ask_tokens(prompt, messages, model, add_special_tokens))

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """As `Client.detokenize`."""
        return await self._ask(vocabulary.ask_text(token_ids, model))

    async def cancel(self, request_id: str) -> bool:
        """As `Client.cancel`."""
        return await self._ask(questions.ask_cancel(request_id))

    async def models(self) -> list[ServedModel]:
        """As `Client.models`."""
        return await self._ask(questions.ask_models())

    async def pipeline(self, pool: str = "") -> status_pb2.PipelineStatus:
        """As `Client.pipeline`."""
        return await self._ask(questions.ask_pipeline(pool))
