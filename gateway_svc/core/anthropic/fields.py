"""The fields of `POST /v1/messages`: those that are done, and what others ask for."""

from typing import Any

import msgspec

from gateway_svc.core.openai import with_parameters
from gateway_svc.core.unsupported import BEAMS, Unsupported


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `thinking`."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `output_config`."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class _MessageBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields beside parameters. Null means the default."""

    model: str | None = None
    max_tokens: int | None = None
    messages: list[msgspec.Raw] | None = None  # each is read by itself
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    # vLLM's and Penstock's
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    resumable: bool | None = None


MESSAGE_BODY = with_parameters(_MessageBody, without=(*BEAMS, "n", "logprobs", "prompt_logprobs", "stop"))
MESSAGE_FIELDS = frozenset(MESSAGE_BODY.__struct_fields__)

# Not there: the values that ask for nothing beyond what is done anyway; null always does.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    # What clears nothing.
    "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "inference_geo": (),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "diagnostics": (),
    "betas": ([],),
    "n": (1,),
    **BEAMS,
}
# In other words or places here, beside those that are so of chats too.
_MISPLACED = {
    "stop": "`stop_sequences` is the name here",
    "input": "a message takes `messages`",
    "instructions": "`system` is the name here",
    "max_completion_tokens": "`max_tokens` is the name here",
    "parallel_tool_calls": "`tool_choice` takes it: {\"disable_parallel_tool_use\": true}",
    "response_format": "`output_config` takes it: {\"format\": …}",
    "output_format": "`output_config` takes it: {\"format\": …}",
    "json_schema": "`output_config` takes it: {\"format\": …}",
    "structural_tag": "`structured_outputs` takes it: {\"structural_tag\": …}",
    "reasoning_effort": "`output_config` takes it: {\"effort\": …}",
    "reasoning": "`thinking` is the name here",
    "logprobs": "a message tells none: /v1/responses and /v1/chat/completions do",
    "top_logprobs": "a message tells none: /v1/responses and /v1/chat/completions do",
    "num_return_sequences": "a message is one",
}  # fmt: skip
UNSUPPORTED = Unsupported(_REFUSED, _MISPLACED)
