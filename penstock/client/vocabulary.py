"""Texts and tokens over gRPC: what they become, and back; nothing is computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np

from contract.domain.errors import invalid
from contract.v1 import inference_pb2
from contract.wire.requests import unpack_u32
from penstock.client.chats import TemplateOptions, encode_chat
from penstock.client.questions import Question
from penstock.client.wire import Chat, ParamsLike, set_prompt, u32


@dataclass(frozen=True, slots=True)
class Rendered:
    """The prompt that a chat becomes."""

    token_ids: list[int]
    text: str  # of these tokens, special ones included
    max_tokens: int  # of output, at most


def ask_tokens(
    prompt: str | None, messages: Chat | None, model: str, add_special_tokens: bool | None
) -> Question[list[int]]:
    """The tokens that a text or a chat becomes.

    Raises:
        PenstockError: INVALID_ARGUMENT: not exactly one of prompt and messages, or one of the wrong type.
    """
    call = inference_pb2.TokenizePromptCall(model=model, add_special_tokens=add_special_tokens)
    if prompt is not None and not isinstance(prompt, str):
        raise invalid(f"prompt must be a text, got {prompt!r:.80}", "prompt")
    set_prompt(call, prompt, messages)
    return Question("Tokenize", call, lambda reply: unpack_u32("token_ids", reply.token_ids))


def ask_text(token_ids: Sequence[int], model: str) -> Question[str]:
    """The text of tokens.

    Raises:
        PenstockError: INVALID_ARGUMENT: they are no token ids.
    """
    call = inference_pb2.DetokenizeTokensCall(model=model, token_ids=u32(token_ids))
    return Question("Detokenize", call, lambda reply: str(reply.text))


def ask_rendered(messages: Chat, params: ParamsLike, **options: Unpack[TemplateOptions]) -> Question[Rendered]:
    """The tokens that a chat would have computed.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the argument.
    """
    chat = encode_chat(messages, params, **options)

    def read(reply: inference_pb2.RenderReply) -> Rendered:
        token_ids = np.frombuffer(reply.request.token_ids.ids, "<u4").tolist()
        return Rendered(token_ids, reply.text, reply.request.stopping.max_tokens)

    return Question("Render", inference_pb2.RenderCall(request=chat.request, chat=chat.chat), read)
