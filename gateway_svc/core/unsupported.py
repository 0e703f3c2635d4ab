"""Fields that OpenAI and vLLM clients send and that are not here: they fail by name unless they ask for nothing."""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.domain.errors import invalid, unimplemented

# Field → the values that ask for nothing beyond what is done anyway; null always does.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "web_search_options": (),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
    "documents": ([],),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "mm_processor_kwargs": (),
    "logits_processors": ([],),
    "return_token_ids": (False,),
    "cache_salt": (),
    "kv_transfer_params": (),
    "thinking_token_budget": (),
    "repetition_detection": (),
}

# Fields of a neighbouring call: answering without them would answer something else than was asked.
_MISPLACED: dict[str, dict[str, str]] = {
    "completion": {
        "messages": "a completion takes `prompt`; chats go to /v1/chat/completions",
        "prompt_token_ids": "give token ids as `prompt`, a list of integers",
        "input": "a completion takes `prompt`",
        "max_completion_tokens": "a completion takes `max_tokens`",
        "top_logprobs": "a completion takes `logprobs`, an integer",
    },
    "chat": {
        "prompt": "a chat takes `messages`; texts and token ids go to /v1/completions",
        "prompt_token_ids": "a chat takes `messages`; token ids go to /v1/completions as `prompt`",
        "input": "a chat takes `messages`",
    },
}

# What changes no output here (accounting, storage, caching): taken and not even reported.
_HARMLESS = frozenset(
    {"metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"parallel_tool_calls", "request_id", "detokenize"}
)


def check_fields(form: str, fields: Mapping[str, msgspec.Raw], known: frozenset[str]) -> tuple[str, ...]:
    """Looks at the names of a body's fields; `form` is completion or chat.

    Returns the names that nobody knows: like vLLM, and unlike OpenAI itself, the gateway ignores them, because clients
    are newer than servers; the caller of this function reports them.

    Raises:
        PenstockError: UNIMPLEMENTED or INVALID_ARGUMENT naming the field.
    """
    unknown = []
    misplaced = _MISPLACED[form]
    for name, raw in fields.items():
        if name in known or name in _HARMLESS:
            continue
        if name in misplaced:
            if bytes(raw) != b"null":
                raise invalid(misplaced[name], name)
        elif name in _NEUTRAL:
            value = msgspec.json.decode(raw)
            if value is not None and value not in _NEUTRAL[name]:
                raise unimplemented(name)
        else:
            unknown.append(name)
    return tuple(unknown)
