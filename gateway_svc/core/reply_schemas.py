"""The bodies of answers, for the description of the API alone: what is written is made by `replies` and `sse`."""

from typing import Any, Literal

import msgspec


class ErrorFields(msgspec.Struct):
    """An error."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(msgspec.Struct):
    """The answer to a call that failed."""

    error: ErrorFields


class UsageFields(msgspec.Struct):
    """Tokens of a call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class CompletionChoice(msgspec.Struct):
    """A sample of a prompt."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: str | int | None


class CompletionReply(msgspec.Struct):
    """The answer to a completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageFields


class Embedding(msgspec.Struct):
    """A vector: numbers, or their little-endian f32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsReply(msgspec.Struct):
    """The answer to a call for embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: UsageFields


class PooledData(msgspec.Struct):
    """A vector, likewise."""

    object: Literal["pooling"]
    index: int
    data: list[float] | str


class PoolingReply(msgspec.Struct):
    """The answer to a call for pooling."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledData]
    usage: UsageFields


class Score(msgspec.Struct):
    """The likeness of two texts, -1 to 1."""

    object: Literal["score"]
    index: int
    score: float


class ScoreReply(msgspec.Struct):
    """The answer to a call for scores."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: UsageFields


class RankedDocument(msgspec.Struct):
    """A document, and its likeness to the query, -1 to 1."""

    index: int
    relevance_score: float
    document: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class RerankReply(msgspec.Struct):
    """The answer to a call for a ranking: the likest first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: UsageFields


class AssistantMessage(msgspec.Struct):
    """The words of a model."""

    role: Literal["assistant"]
    content: str | None


class ChatChoice(msgspec.Struct):
    """A sample of a chat."""

    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: str | int | None


class ChatReply(msgspec.Struct):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageFields


class ResponseUsage(msgspec.Struct):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseReply(msgspec.Struct):
    """The answer to a conversation of items."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    error: None
    incomplete_details: dict[str, str] | None
    usage: ResponseUsage
    store: bool


class MessageUsage(msgspec.Struct):
    """Tokens of a message."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageReply(msgspec.Struct):
    """The answer to a conversation of blocks."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class CountReply(msgspec.Struct):
    """The tokens of a prompt."""

    input_tokens: int


class MessageError(msgspec.Struct):
    """An error as Anthropic has it."""

    type: str
    message: str


class MessageErrorReply(msgspec.Struct):
    """The answer to a call of Anthropic's that failed."""

    type: Literal["error"]
    error: MessageError


class ModelFields(msgspec.Struct):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str | None
    max_model_len: int | None
    generation_defaults: dict[str, Any] | None


class ModelsReply(msgspec.Struct):
    """All of them."""

    object: Literal["list"]
    data: list[ModelFields]


class RequestReply(msgspec.Struct):
    """The state of a request, and once it has ended its reply or error."""

    id: str
    object: str
    created: int
    model: str
    state: Literal["waiting", "running", "ended"]
    reply: dict[str, Any] | None
    error: ErrorFields | None


class PassageFields(msgspec.Struct):
    """One request of a call on its way."""

    request_id: str
    state: Literal["waiting", "running", "ended"]
    moments: list[dict[str, Any]]
    num_more_starts: int


class TimelineReply(msgspec.Struct):
    """The times of a call."""

    id: str
    object: Literal["request.timeline"]
    created: int
    model: str
    state: Literal["waiting", "running", "ended"]
    accepted_unix_ms: float
    requests: list[PassageFields]


class CancelReply(msgspec.Struct):
    """The outcome of a cancel."""

    id: str
    object: Literal["request"]
    cancelled: bool


class TokenizeReply(msgspec.Struct):
    """Tokens of a text or a chat."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(msgspec.Struct):
    """Text of tokens."""

    prompt: str


class RenderReply(msgspec.Struct):
    """A chat as it would be computed."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    stream_options: dict[str, bool] | None
    cache_salt: str | None
    priority: int
    token_offsets: None
    features: None


class HealthReply(msgspec.Struct):
    """The health of a gateway."""

    status: Literal["ok", "stalled"]
    reason: str


class ReadyReply(msgspec.Struct):
    """The readiness of a gateway for new requests."""

    ready: bool


class LoadReply(msgspec.Struct):
    """Requests that it serves now."""

    server_load: int


class VersionReply(msgspec.Struct):
    """The version of Penstock."""

    version: str


class PipelineFigures(msgspec.Struct):
    """Sums over a pool's living services."""

    waiting: int
    running: int
    generated_tokens: int
    cached_tokens: int
    preemptions: int
    blocks_used: int
    blocks_cached: int
    blocks_total: int


class PipelineHop(msgspec.Struct):
    """One hop: its streams, and how its messages fared in the last seconds."""

    hop: str
    from_: str = msgspec.field(name="from")
    to: str
    entries: int
    waiting: float
    rate: float
    wait_p50_ms: float
    wait_p99_ms: float
    work_p50_ms: float
    work_p99_ms: float


class PipelineService(msgspec.Struct):
    """One process."""

    kind: str
    name: str
    state: Literal["ready", "not_ready", "draining", "gone"]
    requests: int
    note: str


class PipelineBlocks(msgspec.Struct):
    """The KV blocks of a worker in groups, with the share of each."""

    worker: str
    num_blocks: int
    group_size: int
    used: list[float]
    cached: list[float]


class PipelineReply(msgspec.Struct):
    """The picture of a pool."""

    object: Literal["pipeline"]
    pool: str
    figures: PipelineFigures
    hops: list[PipelineHop]
    services: list[PipelineService]
    blocks: list[PipelineBlocks]
