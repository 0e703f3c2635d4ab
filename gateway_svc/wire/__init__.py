"""Protobuf to domain and back."""

from gateway_svc.wire.clients import (
    GrpcAsk,
    accepted_event,
    decode_embed,
    decode_generate,
    decode_offsets,
    deltas,
    embed_reply,
)
from gateway_svc.wire.operations import (
    count_sessions,
    decode_worker,
    pipeline_status,
    pool_load,
    takes_priorities,
    told_facts,
)
from gateway_svc.wire.prompt_outputs import decode_prompt_logprobs, decode_prompt_vector, prompt_events
from gateway_svc.wire.reply_form import decode_reply_form, encode_reply_form
from gateway_svc.wire.requests import asked_digest, count_prompt_tokens, encode_header, encode_prompt, encode_request
from gateway_svc.wire.text import (
    decode_finished,
    decode_finished_timeline,
    decode_text,
    encode_offsets,
    error_code,
)
from gateway_svc.wire.vocabulary import (
    Question,
    detokenize_question,
    prepare_question,
    read_prepared,
    read_spelled,
    read_text,
    read_tokenized,
    spell_question,
    tokenize_question,
    tokenizers_error,
)

__all__ = [
    "GrpcAsk",
    "Question",
    "accepted_event",
    "asked_digest",
    "count_prompt_tokens",
    "count_sessions",
    "decode_embed",
    "decode_finished",
    "decode_finished_timeline",
    "decode_generate",
    "decode_offsets",
    "decode_prompt_logprobs",
    "decode_prompt_vector",
    "decode_reply_form",
    "decode_text",
    "decode_worker",
    "deltas",
    "detokenize_question",
    "embed_reply",
    "encode_header",
    "encode_offsets",
    "encode_prompt",
    "encode_reply_form",
    "encode_request",
    "error_code",
    "pipeline_status",
    "pool_load",
    "prepare_question",
    "prompt_events",
    "read_prepared",
    "read_spelled",
    "read_text",
    "read_tokenized",
    "spell_question",
    "takes_priorities",
    "tokenize_question",
    "tokenizers_error",
    "told_facts",
]
