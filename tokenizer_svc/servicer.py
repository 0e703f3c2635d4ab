"""The gRPC control service: the same core that the pipeline uses."""

import asyncio
from typing import Any

import numpy as np

from contract.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from servicekit.rpc import RpcService
from tokenizer_svc import wire
from tokenizer_svc.core.tokenize import PromptTokenizer


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServicer):
    """`penstock.v1.Tokenizer`; long texts work in threads, so that no call holds up another."""

    def __init__(self, prompts: PromptTokenizer) -> None:
        self._prompts = prompts

    async def Tokenize(self, request: tokenizer_pb2.TokenizeCall, _context: Any) -> tokenizer_pb2.TokenizeReply:  # noqa: N802
        """Token ids of a text."""
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        ids = await asyncio.to_thread(self._prompts.encode, request.text, add_special_tokens=special, param="text")
        return tokenizer_pb2.TokenizeReply(token_ids=wire.pack(ids))

    async def Detokenize(  # noqa: N802
        self, request: tokenizer_pb2.DetokenizeCall, _context: Any
    ) -> tokenizer_pb2.DetokenizeReply:
        """Text of token ids."""
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await asyncio.to_thread(self._prompts.decode, wire.decode_ids(request), skip_special_tokens=skip)
        return tokenizer_pb2.DetokenizeReply(text=text)

    async def ApplyChatTemplate(  # noqa: N802
        self, request: tokenizer_pb2.ApplyChatTemplateCall, _context: Any
    ) -> tokenizer_pb2.ApplyChatTemplateReply:
        """The prompt that the model's chat template makes of messages."""
        prompt = wire.chat_prompt(request.messages)
        text, ids = await asyncio.to_thread(self._prompts.render_chat, prompt)
        return tokenizer_pb2.ApplyChatTemplateReply(prompt=text, token_ids=wire.pack(np.asarray(ids)))


def rpc_service(prompts: PromptTokenizer) -> RpcService:
    """`penstock.v1.Tokenizer` for the process's gRPC server."""
    return RpcService(
        "penstock.v1.Tokenizer",
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server,
        TokenizerServicer(prompts),
    )
