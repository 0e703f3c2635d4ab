"""The gRPC control service: the same core that the pipeline uses."""

import asyncio
from typing import Any

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
        return await asyncio.to_thread(self._tokenize, request)

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
        return await asyncio.to_thread(self._apply_chat_template, request)

    async def Prepare(self, request: tokenizer_pb2.PrepareCall, _context: Any) -> tokenizer_pb2.PrepareReply:  # noqa: N802
        """The tokens that a request would have computed."""
        return await asyncio.to_thread(self._prepare, request)

    async def Spell(self, request: tokenizer_pb2.SpellCall, _context: Any) -> tokenizer_pb2.SpellReply:  # noqa: N802
        """The bytes that tokens stand for."""
        return wire.spelled(await asyncio.to_thread(self._prompts.token_bytes, wire.decode_ids(request)))

    def _tokenize(self, call: tokenizer_pb2.TokenizeCall) -> tokenizer_pb2.TokenizeReply:
        special = call.add_special_tokens if call.HasField("add_special_tokens") else True
        ids = self._prompts.encode(call.text, add_special_tokens=special, param="text")
        return tokenizer_pb2.TokenizeReply(
            token_ids=wire.pack(ids),
            token_strs=self._prompts.spell(ids) if call.return_token_strs else (),
            max_model_len=self._prompts.vocabulary.context_length,
        )

    def _apply_chat_template(self, call: tokenizer_pb2.ApplyChatTemplateCall) -> tokenizer_pb2.ApplyChatTemplateReply:
        prompt = wire.chat_prompt(call.messages)
        text, ids = self._prompts.render_chat(
            prompt, now_ns=call.arrival_unix_ns, add_special_tokens=call.add_special_tokens
        )
        return tokenizer_pb2.ApplyChatTemplateReply(
            prompt=text,
            token_ids=wire.pack(ids),
            token_strs=self._prompts.spell(ids) if call.return_token_strs else (),
            max_model_len=self._prompts.vocabulary.context_length,
        )

    def _prepare(self, call: tokenizer_pb2.PrepareCall) -> tokenizer_pb2.PrepareReply:
        prepared = self._prompts.tokenize(wire.decode_prepare(call))
        return tokenizer_pb2.PrepareReply(
            token_ids=wire.pack(prepared.token_ids), prompt=wire.tokenized_message(prepared)
        )


def rpc_service(prompts: PromptTokenizer) -> RpcService:
    """`penstock.v1.Tokenizer` for the process's gRPC server."""
    return RpcService(
        "penstock.v1.Tokenizer",
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server,
        TokenizerServicer(prompts),
    )
