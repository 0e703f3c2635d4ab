"""The form of a call's answer: all that a gateway must know to go on with it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from contract.domain.errors import PenstockError
from contract.domain.request import Request, format_request_id
from gateway_svc.core.ask import Ask, Form
from gateway_svc.core.field_names import FieldNames, in_callers_words
from gateway_svc.core.formats.reading import OutputReading
from gateway_svc.core.replies import ReplyHead, ToldPrompt


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """One call: several prompts are several requests that end together."""

    request_ids: tuple[bytes, ...]  # 16 bytes each, by prompt
    n: int  # samples of each
    form: Form  # over HTTP
    model: str
    arrival_ns: int  # Unix time
    deadline_ns: int  # Unix time; 0: none
    seed: int  # unsigned 64-bit, of the first sample
    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False  # told by themselves
    echoes_logprobs: bool = False  # of a completion: logprobs begin with those of the prompt
    without_output: bool = False  # of a completion: the prompt alone is told
    tokens_as_ids: bool = False
    include_usage: bool = False  # of a stream
    is_resumable: bool = False  # outlives its connection for a grace time
    continuous_usage: bool = False  # of a stream, in every chunk
    asked: bytes = b""  # with an idempotency key, a hash over what was asked
    pool: str = ""  # named in the ids that clients see, as this gateway calls it; not kept with the request
    api_key: bytes = b""  # for which its requests count, 8 bytes; empty: for none
    stream_interval: int = 0  # tokens that an event stream tells at once; 0: as they come
    prompts: tuple[ToldPrompt, ...] = ()  # what is told of each; none: nothing
    returns_token_ids: bool = False
    reading: OutputReading | None = None  # of a chat whose outputs are more than content
    context: bytes = b""  # JSON, what the reply repeats of the call; empty: nothing
    names: FieldNames = ()  # that the caller has for fields, where they are others

    @classmethod
    def of(cls, ask: Ask, requests: Sequence[Request], pool: str) -> "ReplyForm":
        """The form of a new call's reply, whose ids name `pool`."""
        header = requests[0].header
        return cls(
            request_ids=tuple(each.header.request_id for each in requests),
            n=ask.params.n,
            form=ask.form,
            model=requests[0].model,
            arrival_ns=header.arrival_ns,
            deadline_ns=header.deadline_ns,
            seed=header.seed,
            wants_logprobs=ask.params.logprobs is not None,
            wants_prompt_logprobs=ask.wants_prompt_logprobs,
            echoes_logprobs=ask.echo and ask.params.logprobs is not None,
            without_output=ask.without_output,
            tokens_as_ids=ask.tokens_as_ids,
            include_usage=ask.include_usage,
            continuous_usage=ask.continuous_usage,
            reading=ask.reading,
            context=ask.context,
            pool=pool,
            stream_interval=ask.stream_interval,
            returns_token_ids=ask.returns_token_ids,
            names=ask.names,
        )

    @property
    def shown_id(self) -> str:
        """The id of the call, without OpenAI's prefix."""
        return format_request_id(self.request_ids[0], self.pool)

    @property
    def num_choices(self) -> int:
        """Choices of the reply, indexed prompt * n + sample."""
        return len(self.request_ids) * self.n

    @property
    def needs_prompt_outputs(self) -> bool:
        """Return whether the reply tells logprobs of its prompts, or their vectors."""
        return self.wants_prompt_logprobs or self.echoes_logprobs or self.form.is_pooled

    @property
    def of_another(self) -> "ReplyForm":
        """The form that is kept beside the call's other requests: with the id of the first alone."""
        return replace(self, request_ids=self.request_ids[:1], prompts=(), context=b"", names=())

    def told_error(self, error: PenstockError, prompt: int) -> PenstockError:
        """The error of the request with this prompt, in the caller's words."""
        return in_callers_words(error, self.names, prompt)

    @property
    def head(self) -> ReplyHead:
        """The beginning of its chunks."""
        return ReplyHead(
            form=self.form,
            call_id=self.form.id_prefix + self.shown_id,
            model=self.model,
            created_s=self.arrival_ns // 10**9,
            num_choices=self.num_choices,
            wants_logprobs=self.wants_logprobs,
            wants_prompt_logprobs=self.wants_prompt_logprobs,
            echoes_logprobs=self.echoes_logprobs,
            without_output=self.without_output,
            tokens_as_ids=self.tokens_as_ids,
            include_usage=self.include_usage,
            continuous_usage=self.continuous_usage,
            prompts=self.prompts,
            returns_token_ids=self.returns_token_ids,
            reading=self.reading,
            request_id=self.request_ids[0],
            context=self.context,
        )
