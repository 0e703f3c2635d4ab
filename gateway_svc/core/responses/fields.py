"""The fields of `POST /v1/responses`: those that are done, and what others ask for."""

from typing import Any

import msgspec

from gateway_svc.core.openai import with_parameters
from gateway_svc.core.unsupported import BEAMS, Unsupported


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `reasoning`; what a model thinks is told as it is, so there is no summary of it."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `text`."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class _ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields beside parameters. Null means the default."""

    model: str | None = None
    input: str | list[msgspec.Raw] | None = None  # items are read one by one
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    # vLLM's and Penstock's
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    resumable: bool | None = None


RESPONSE_BODY = with_parameters(_ResponseBody, without=(*BEAMS, "n", "logprobs", "prompt_logprobs", "max_tokens"))
RESPONSE_FIELDS = frozenset(RESPONSE_BODY.__struct_fields__)

# Not there: the values that ask for nothing beyond what is done anyway; null always does.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "context_management": ([],),
    "moderation": (),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "image": (),
    "background_options": (),
    "access_programs": (),
    "n": (1,),
    **BEAMS,
}
_MAX = "`max_output_tokens` is the name here"
# In other words or places here, beside those that are so of chats too.
_MISPLACED = {
    "messages": "a response takes `input`",
    "max_tokens": _MAX,
    "max_completion_tokens": _MAX,
    "max_length": _MAX,
    "max_new_tokens": _MAX,
    "n_predict": _MAX,
    "num_predict": _MAX,
    "response_format": "`text` takes it: {\"format\": …}",
    "json_schema": "`text` takes it: {\"format\": {\"type\": \"json_schema\", …}}",
    "structural_tag": "`structured_outputs` takes it: {\"structural_tag\": …}",
    "reasoning_effort": "`reasoning` takes it: {\"effort\": …}",
    "logprobs": "say `include`: [\"message.output_text.logprobs\"], and `top_logprobs`",
    "system": "`instructions` is the name here",
    "num_return_sequences": "a response has one output",
}  # fmt: skip
# Taken, and nothing changes by them.
_HARMLESS = frozenset(
    {"client_metadata", "prompt_cache_key", "prompt_cache_options", "safety_identifier", "prompt_cache_retention"}
)
UNSUPPORTED = Unsupported(_REFUSED, _MISPLACED, _HARMLESS)
