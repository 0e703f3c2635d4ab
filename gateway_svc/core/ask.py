"""A checked call over HTTP: what to generate and how to answer, whichever API it was asked in."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

from contract.domain.generation_defaults import GenerationDefaults
from contract.domain.params import SamplingParams
from contract.domain.pooling import Pooling, PoolingFacts
from contract.domain.request import Prompt
from gateway_svc.core.field_names import FieldNames
from gateway_svc.core.formats.choice import ModelFormats
from gateway_svc.core.formats.reading import OutputReading

DefaultsOf: TypeAlias = Callable[[str], GenerationDefaults]  # of a model, by the name that a body has for it


class Models(Protocol):
    """The models by which a body is read."""

    def defaults(self, name: str) -> GenerationDefaults:
        """The parameters that hold for a model of this name where a request says nothing.

        Raises:
            PenstockError: there is none, or it is not known yet.
        """
        ...

    def formats(self, name: str) -> ModelFormats:
        """The formats in which outputs of a model of this name are read.

        Raises:
            PenstockError: there is none.
        """
        ...

    def pooling(self, name: str) -> PoolingFacts:
        """The pooling of prompts by a model of this name where a request does not say otherwise.

        Raises:
            PenstockError: there is none, or it is not known yet.
        """
        ...


class Form(Enum):
    """The kinds of reply, as they are kept with a request."""

    COMPLETION = "completion"
    CHAT = "chat"
    RESPONSE = "response"
    MESSAGE = "message"
    EMBEDDING = "embedding"
    POOLING = "pooling"
    SCORE = "score"
    RERANK = "rerank"

    @property
    def id_prefix(self) -> str:
        """The prefix of the ids of such replies."""
        return _ID_PREFIXES[self]

    @property
    def is_pooled(self) -> bool:
        """Return whether the reply is made of vectors: nothing is generated."""
        return self in _POOLED


_ID_PREFIXES = {
    Form.COMPLETION: "cmpl-",
    Form.CHAT: "chatcmpl-",
    Form.RESPONSE: "resp_",
    Form.MESSAGE: "msg_",
    Form.EMBEDDING: "embd-",
    Form.POOLING: "pooling-",
    Form.SCORE: "score-",
    Form.RERANK: "rerank-",
}
_POOLED = frozenset((Form.EMBEDDING, Form.POOLING, Form.SCORE, Form.RERANK))


@dataclass(frozen=True, slots=True)
class Ask:
    """One checked call: several prompts are several requests with the same parameters."""

    form: Form
    model: str  # empty: the one that is served
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    priority: int = 0
    stream: bool = False
    include_usage: bool = False  # of a stream
    continuous_usage: bool = False  # of a stream, in every chunk: so many tokens of its choice so far
    tokens_as_ids: bool = False  # vLLM's `return_tokens_as_token_ids`: logprobs name tokens `token_id:7`
    is_resumable: bool = False  # Penstock's `resumable`
    stream_interval: int = 0  # vLLM's: tokens that a stream tells at once; 0: as they come
    echo: bool = False  # of a completion: the prompt's text stands before the output's, its logprobs before these
    without_output: bool = False  # of a completion: the prompt alone is told
    returns_token_ids: bool = False  # vLLM's `return_token_ids`
    wants_prompt_logprobs: bool = False  # told by themselves
    cache_salt: str = ""  # vLLM's
    client_id: str | None = None  # vLLM's `request_id`: what the client calls it
    ignored_fields: tuple[str, ...] = ()
    unsaid: frozenset[str] = frozenset()  # parameters that were left to the defaults
    reading: OutputReading | None = None  # of a chat; None: outputs are content as they are
    context: bytes = b""  # JSON, what the reply repeats of the call; empty: nothing
    pooling: Pooling | None = None  # the prompts become vectors, and nothing is generated; None: it is
    names: FieldNames = ()  # that the caller has for fields, where they are others

    @property
    def num_choices(self) -> int:
        """Choices in the reply, indexed prompt * n + sample."""
        return len(self.prompts) * self.params.n
