"""Chats of gRPC clients whose outputs are told apart: thoughts, content and calls of functions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from contract.domain import chain
from contract.domain.errors import invalid
from contract.domain.rows import TextRow
from contract.v1 import inference_pb2
from contract.wire.deltas import encode_delta
from gateway_svc.core.streams import split
from gateway_svc.core.told import ToldChoice
from gateway_svc.core.tools import AUTO_CHOICE, NO_CHOICE, REQUIRED, ToolFields

_MODES = {
    inference_pb2.TOOL_MODE_UNSPECIFIED: AUTO_CHOICE,
    inference_pb2.TOOL_MODE_NONE: NO_CHOICE,
    inference_pb2.TOOL_MODE_AUTO: AUTO_CHOICE,
    inference_pb2.TOOL_MODE_REQUIRED: REQUIRED,
}


def decode_chat(chat: inference_pb2.ChatOutput) -> ToolFields:
    """The wishes of a client for outputs, in the words of OpenAI's clients.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field.
    """
    tools = [_tool(f"tools[{index}]", each) for index, each in enumerate(chat.tools)]
    return ToolFields(
        tools or None,
        _choice(chat.tool_choice),
        chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else None,
        False if chat.without_reasoning else None,
    )


def told_deltas(choice: int, row: TextRow, told: ToldChoice, max_tokens: int) -> list[inference_pb2.GenerateEvent]:
    """A choice's row as events, of which the last one tells what it adds to the output.

    Args:
        choice: prompt * n + sample.
        row: extends the choice's row before.
        told: what its client was told so far.
        max_tokens: of one event.
    """
    parts = split(row, max_tokens, max(len(row.text), 1))
    events = [
        inference_pb2.GenerateEvent(delta=encode_delta(replace(part, text="", text_offset=0), choice)) for part in parts
    ]
    last = events[-1].delta
    last.chat.CopyFrom(_chat(told.delta(row), told.num_reasoning_tokens if row.finish else None))
    last.characters_after = row.text_offset + len(row.text) if row.finish else told.place
    last.chain_after = chain.extend(row.chain, row.token_ids)
    return events


def _chat(delta: Mapping[str, Any], num_reasoning_tokens: int | None) -> inference_pb2.ChatDelta:
    calls = [
        inference_pb2.ToolCallDelta(
            index=each["index"],
            id=each.get("id", ""),
            name=each["function"].get("name", ""),
            arguments=each["function"]["arguments"],
        )
        for each in delta.get("tool_calls", ())
    ]
    return inference_pb2.ChatDelta(
        reasoning=delta.get("reasoning", ""),
        content=delta.get("content", ""),
        tool_calls=calls,
        reasoning_tokens=num_reasoning_tokens,
    )


def _tool(where: str, tool: inference_pb2.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters_json:
        try:
            function["parameters"] = msgspec.json.decode(tool.parameters_json, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            name = f"{where}.parameters_json"
            raise invalid(f"{name} must be a JSON schema, an object: {error}", name) from error
    if tool.strict:  # a template may tell it, and is given what it would be over HTTP
        function["strict"] = True
    return {"type": "function", "function": function}


def _choice(choice: inference_pb2.ToolChoice) -> str | dict[str, Any]:
    if choice.WhichOneof("choice") == "function":
        return {"type": "function", "function": {"name": choice.function}}
    mode = _MODES.get(choice.mode)
    if mode is None:
        raise invalid(f"tool_choice.mode is none of its values, got {choice.mode}", "tool_choice")
    return mode
