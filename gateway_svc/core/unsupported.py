"""Fields that OpenAI's, vLLM's, SGLang's, TGI's and llama.cpp's clients send and that are not here.

What some engine gives a meaning fails by name unless its value asks for nothing; what nobody knows is told.
"""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from contract.domain.errors import PenstockError, invalid, unimplemented
from contract.domain.params import PARAMETERS
from gateway_svc.core.structured_outputs import FormFields

# Field → the values that ask for nothing beyond what is done anyway; null always does.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "stream_options.include_obfuscation": (False,),
    # vLLM
    "prompt_embeds": (),
    "guided_decoding_backend": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "logits_processors": ([],),
    "return_prompt_text": (False,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "lora_request": (),
    # SGLang
    "stop_regex": ("", []),
    "lora_path": (),
    "session_params": (),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "extra_key": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_cached_tokens_details": (False,),
    "return_meta_info": (False,),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "data_parallel_rank": (),
    "routed_dp_rank": (),
    # TGI, transformers
    "adapter_id": (),
    "decoder_input_details": (False,),
    "details": (False,),
    "do_sample": (True,),
    "guideline": (),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1, 1.0),
    "diversity_penalty": (0, 0.0),
    "return_full_text": (False,),
    "tool_prompt": (),
    "top_n_tokens": (0,),
    "truncate": (),
    "typical_p": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "watermark": (False,),
    # llama.cpp, Ollama and their front ends
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "format": ("",),
    "id_slot": (-1,),
    "images": ([],),
    "keep_alive": (),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "n_probs": (0,),
    "samplers": (),
    "smoothing_factor": (0, 0.0),
    "tfs": (1, 1.0),
    "tfs_z": (1, 1.0),
    "top_a": (0, 0.0),
    "top_n_sigma": (-1, -1.0, 0, 0.0),
    "xtc_probability": (0, 0.0),
    # Routers
    "enable_search": (False,),
    "models": ([],),
    "plugins": ([],),
    "provider": ({},),
    "route": (),
    "transforms": ([],),
}

# Of APIs that tell one output: a search of beams finds several.
BEAMS: Final[dict[str, tuple[Any, ...]]] = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
}

_THINKING = "whether a model thinks is its chat template's: give what the template knows in `chat_template_kwargs`"
_OWN_ID = "`request_id` is the name here"
_IN_BODY = "parameters stand in the body itself, under OpenAI's names"
_LENGTH = "`max_tokens` is the name here"

# What has another name or place here; null asks for nothing. First for both calls, then for each.
MISPLACED: dict[str, dict[str, str]] = {
    "": {
        "enable_thinking": _THINKING,
        "reasoning": _THINKING,
        "think": _THINKING,
        "thinking": _THINKING,
        "thinking_budget": _THINKING,
        "rid": _OWN_ID,
        "max_length": _LENGTH,
        "max_new_tokens": _LENGTH,
        "max_output_tokens": _LENGTH,
        "n_predict": _LENGTH,
        "num_predict": _LENGTH,
        "min_length": "`min_tokens` is the name here",
        "min_new_tokens": "`min_tokens` is the name here",
        "no_stop_trim": "`include_stop_str_in_output` is the name here",
        "num_return_sequences": "`n` is the name here",
        "num_beams": "say `use_beam_search`: true, and the number of beams as `n`",
        "beam_width": "say `use_beam_search`: true, and the number of beams as `n`",
        "grammar": '`structured_outputs` takes it: {"grammar": …}',
        "random_seed": "`seed` is the name here",
        "sampling_seed": "`seed` is the name here",
        "repeat_penalty": "`repetition_penalty` is the name here",
        "stop_sequences": "`stop` is the name here",
        "return_logprob": "`logprobs` is the name here",
        "token_ids_logprob": "`logprob_token_ids` is the name here",
        "top_logprobs_num": "`logprobs` of a completion and `top_logprobs` of a chat are the names here",
        "logprob_start_len": "`prompt_logprobs` tells those of the prompt, as does `echo` beside `logprobs`",
        "ignore_eos_token": "`ignore_eos` is the name here",
        "regex": '`structured_outputs` takes it: {"regex": …}',
        "ebnf": '`structured_outputs` takes it: {"grammar": …}',
        "json_schema": '`response_format` takes it: {"type": "json_schema", …}',
        "structural_tag": '`response_format` takes it: {"type": "structural_tag", …}',
        "options": _IN_BODY,
        "parameters": _IN_BODY,
        "sampling_params": _IN_BODY,
        "input_ids": "give token ids as `prompt` of /v1/completions, a list of integers",
    },
    "completion": {
        "documents": "a completion has no template; chats go to /v1/chat/completions",
        "reasoning_effort": "a completion has no template; chats go to /v1/chat/completions",
        "chat_template": "a completion has no template; chats go to /v1/chat/completions",
        "add_generation_prompt": "a completion has no template; chats go to /v1/chat/completions",
        "continue_final_message": "a completion has no template; chats go to /v1/chat/completions",
        "tools": "a completion has no template; chats go to /v1/chat/completions",
        "tool_choice": "a completion has no template; chats go to /v1/chat/completions",
        "parallel_tool_calls": "a completion has no template; chats go to /v1/chat/completions",
        "include_reasoning": "a completion is told as it is; chats go to /v1/chat/completions",
        "messages": "a completion takes `prompt`; chats go to /v1/chat/completions",
        "prompt_token_ids": "give token ids as `prompt`, a list of integers",
        "input": "a completion takes `prompt`",
        "inputs": "a completion takes `prompt`",
        "text": "a completion takes `prompt`",
        "max_completion_tokens": "a completion takes `max_tokens`",
        "top_logprobs": "a completion takes `logprobs`, an integer",
        "chat_template_kwargs": "a completion has no template; chats go to /v1/chat/completions",
    },
    "chat": {
        "prompt": "a chat takes `messages`; texts and token ids go to /v1/completions",
        "prompt_token_ids": "a chat takes `messages`; token ids go to /v1/completions as `prompt`",
        "input": "a chat takes `messages`",
        "inputs": "a chat takes `messages`",
        "text": "a chat takes `messages`",
        "instructions": "give a message with the role system",
        "system": "give a message with the role system",
    },
}

# What changes no output whatever its value: names for accounting, hints for caches, and what counts only beside
# fields that are refused.
HARMLESS = frozenset(
    {"metadata", "safety_identifier", "prompt_cache_key", "cache_prompt"}
    | {"mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent", "smoothing_curve"}
    | {"dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"}
)


# Fields of completions and chats that mean nothing to an API that does not have them; a value like false asks for
# nothing.
_OF_OUTPUTS = frozenset((*PARAMETERS, *FormFields.__struct_fields__)) | {
    *("tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "reasoning_effort"),
    *("documents", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("echo", "return_token_ids", "return_tokens_as_token_ids", "stream_interval", "spaces_between_special_tokens"),
}
_FORMS_OF_OUTPUTS = ("completion", "chat")


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The fields of one API that are not there; before those that are so everywhere."""

    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # the values that ask for nothing
    misplaced: Mapping[str, str] = field(default_factory=dict)  # what to send instead
    harmless: Collection[str] = ()


_NOTHING_MORE: Final = Unsupported()


def check_fields(
    form: str, fields: Mapping[str, msgspec.Raw], known: Collection[str], own: Unsupported = _NOTHING_MORE
) -> tuple[str, ...]:
    """Looks at the names of a body's fields; `form` is the kind of call, completion or chat among them.

    Returns the names that nobody knows: like vLLM, and unlike OpenAI itself, the gateway goes on without them, because
    clients are newer than servers; the caller of this function tells its client, or refuses them (`unknown_field`).

    Raises:
        PenstockError: UNIMPLEMENTED or INVALID_ARGUMENT naming the field.
    """
    unknown = []
    for name, raw in fields.items():
        if name in known or name in HARMLESS or name in own.harmless:
            continue
        hint = None
        if name not in own.neutral:
            hint = own.misplaced.get(name) or MISPLACED.get(form, {}).get(name) or MISPLACED[""].get(name)
        neutral = own.neutral.get(name, NEUTRAL.get(name))
        if hint is None and neutral is None and name in _OF_OUTPUTS and form not in _FORMS_OF_OUTPUTS:
            if msgspec.json.decode(raw):
                raise invalid(f"{name} is not taken here: /v1/completions and /v1/chat/completions take it", name)
        elif hint is None and neutral is None:
            unknown.append(name)
        elif bytes(raw) == b"null":
            continue
        elif hint is not None:
            raise invalid(f"{name} is not taken here: {hint}", name)
        elif neutral is not None and msgspec.json.decode(raw) not in neutral:
            raise unimplemented(name)
    return tuple(unknown)


def unknown_field(form: str, name: str, known: Collection[str]) -> PenstockError:
    """The error of a field that nobody knows where such are refused, with the name that it is nearest to."""
    names = {*known, *HARMLESS, *NEUTRAL, *MISPLACED[""], *MISPLACED.get(form, {})}
    nearest = difflib.get_close_matches(name[:64], sorted(names), 1)
    question = f": did you mean {nearest[0]!r}?" if nearest else ""
    return invalid(f"there is no field {name!r:.66}{question}", name[:64])
