"""The HTTP APIs as clients of the load speak them: what is posted where, and what each event adds to a story."""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from bench.rig.chaos.recipes import Api, Recipe
from bench.rig.chaos.stories import End, Sample, Story
from contract.domain.request import parse_request_id
from gateway_svc.core.formats.call_ids import call_id
from gateway_svc.core.part_ids import part_id

INTERVAL = 8  # tokens of an event, for recipes that say so
_MAX_PARTS = 64  # of an output, calls among them
_ID = re.compile(r"(?:(?:resp|rs|msg|fc|call|toolu)_)?[0-9a-f]{24,32}")


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API."""

    path: str
    body: Callable[[Recipe], dict[str, Any]]
    take: Callable[[Story, dict[str, Any]], None]  # an event, or the reply; what ends a story says so in it
    streams: bool = True


def _chat_body(recipe: Recipe) -> dict[str, Any]:
    params = recipe.params
    return {
        **recipe.asked,
        "n": params.n,
        "temperature": params.temperature,
        "seed": params.seed,
        "max_tokens": params.max_tokens,
        "ignore_eos": params.ignore_eos,
        "stop": list(params.stop or ()) or None,
        "use_beam_search": params.use_beam_search,
        "length_penalty": params.length_penalty,
        "early_stopping": params.early_stopping,
        "logprobs": params.logprobs,
        "logprob_token_ids": list(params.logprob_token_ids or ()) or None,
        "prompt_logprobs": params.prompt_logprobs,
        "structured_outputs": params.structured_outputs and {"regex": params.structured_outputs.regex},
        "repetition_detection": params.repetition_detection and asdict(params.repetition_detection),
        "detokenize": params.detokenize,
        "stream_options": {"include_usage": True},
    }


def _completion_body(recipe: Recipe) -> dict[str, Any]:
    body = {**_chat_body(recipe), "prompt": list(recipe.prompt_ids)}
    if recipe.is_told:
        body |= {"echo": True, "return_token_ids": True, "stream_interval": INTERVAL}
    return body


def _part_body(recipe: Recipe) -> dict[str, Any]:
    return {**recipe.asked, "temperature": recipe.params.temperature, "seed": recipe.params.seed}


def _embedding_body(recipe: Recipe) -> dict[str, Any]:
    assert recipe.pooling is not None
    return {
        "input": list(recipe.prompt_ids),
        "pooling_type": recipe.pooling.kind.name,
        "normalize": recipe.pooling.normalize,
        "dimensions": recipe.pooling.dimensions or None,
    }


def _take_embedding(story: Story, reply: dict[str, Any]) -> None:
    story.request_id = reply["id"]
    story.vector = reply["data"][0]["embedding"]
    story.usage = reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]
    story.end = End.DONE


def _take_chunk(story: Story, chunk: dict[str, Any], take: Callable[[Story, Sample, dict[str, Any]], None]) -> None:
    if "error" in chunk:
        _fail(story, chunk["error"]["message"], is_away=chunk["error"]["code"] == "unavailable")
        return
    story.request_id = chunk["id"]
    if "system_fingerprint" in chunk:
        story.fingerprints.add(chunk["system_fingerprint"])
    if chunk.get("usage"):
        story.usage = chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]
    for choice in chunk["choices"]:
        sample = story.samples[choice["index"]]
        take(story, sample, choice)
        sample.token_ids += choice.get("token_ids") or ()
        story.prompt_ids = story.prompt_ids or tuple(choice.get("prompt_token_ids") or ())
        if told := choice.get("prompt_logprobs"):
            story.prompt_logprobs = [
                {int(token): (each["logprob"], each["rank"]) for token, each in one.items()} for one in told[1:]
            ]
        sample.finish = choice["finish_reason"] or sample.finish
        if choice.get("logprobs"):
            columns = choice["logprobs"]
            several = zip(columns["token_logprobs"], columns["top_logprobs"], strict=True)
            sample.logprobs += [value for own, top in several for value in (own, *top.values())]


def _take_completion(_story: Story, sample: Sample, choice: dict[str, Any]) -> None:
    sample.text += choice["text"]


def _take_chat(story: Story, sample: Sample, choice: dict[str, Any]) -> None:
    delta = choice["delta"]
    sample.text += delta.get("content") or ""
    sample.reasoning += delta.get("reasoning") or ""
    for call in delta.get("tool_calls", ()):
        if "id" in call:
            sample.calls += told_call(story, choice["index"], call["index"], call["id"], call["function"]["name"])
        sample.calls += call["function"]["arguments"]


def told_call(story: Story, choice: int, index: int, told_id: str, name: str) -> str:
    """The beginning of a call of a function, without the id that it must have."""
    derived = call_id(parse_request_id(story.request_id), choice, index)
    return f"\n{index} {told_id.replace(derived, '')} {name} "


def _take_response(story: Story, event: dict[str, Any]) -> None:
    if event["type"] == "error":
        _fail(story, event["message"], is_away=event["code"] == "unavailable")
        return
    response = event.get("response")
    if response is not None:
        story.request_id = response["id"]
        response["created_at"] = 0
        if usage := response["usage"]:
            story.usage = usage["input_tokens"], usage["output_tokens"]
            usage["input_tokens_details"] = {}  # how much was cached depends on what was there before
    _note(story, event)
    if event["type"] in ("response.completed", "response.incomplete"):
        story.end = End.DONE


def _take_message(story: Story, event: dict[str, Any]) -> None:
    if event["type"] == "error":
        _fail(story, event["error"]["message"], is_away=event["error"]["type"] == "overloaded_error")
        return
    message = event.get("message")
    if message is not None:
        story.request_id = message["id"]
    if usage := (message or event).get("usage"):
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
        story.usage = usage["input_tokens"], usage["output_tokens"]
    _note(story, event)
    if event["type"] == "message_stop":
        story.end = End.DONE


def _note(story: Story, event: dict[str, Any]) -> None:
    """Keep an event, without ids that follow from the request's; what grows one part is one event."""
    sample = story.samples[0]
    event = _without(_derived(story.request_id), event)
    delta = event.get("delta")
    grown = delta if isinstance(delta, str) else delta.get("text", "") if isinstance(delta, dict) else ""
    if event["type"] in ("response.output_text.delta", "content_block_delta"):
        sample.text += grown
    last = sample.events[-1] if sample.events else {}
    if last.get("type") == event["type"] and (merged := _merged(last.get("delta"), delta)) is not None:
        sample.events[-1] = {**event, "delta": merged}
    else:
        sample.events.append(event)


def _merged(last: Any, more: Any) -> Any:
    """Two growths as one; None: they are none, or not of one kind."""
    if isinstance(last, str) and isinstance(more, str):
        return last + more
    if isinstance(last, dict) and isinstance(more, dict) and "type" in more and last.get("type") == more["type"]:
        return {name: value if name == "type" else last[name] + value for name, value in more.items()}
    return None


@lru_cache(64)
def _derived(request_id: str) -> frozenset[str]:
    digits = parse_request_id(request_id)
    prefixes, callers = ("rs_", "msg_", "fc_", ""), ("call_", "toolu_")
    found = {part_id(prefix, digits, index) for prefix in prefixes for index in range(_MAX_PARTS)}
    found |= {call_id(digits, 0, index, prefix) for prefix in callers for index in range(_MAX_PARTS)}
    return frozenset({*found, request_id})


def _without(ids: frozenset[str], value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without(ids, each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without(ids, each) for each in value]
    return "" if isinstance(value, str) and _ID.fullmatch(value) and value in ids else value


def _fail(story: Story, message: str, *, is_away: bool) -> None:
    """The stream ended with an error; that its gateway goes is as a connection that breaks."""
    story.fail(End.BROKEN if is_away else End.FAILED, message)


DIALECTS: Mapping[Api, Dialect] = {
    Api.COMPLETIONS: Dialect(
        "/v1/completions", _completion_body, lambda story, chunk: _take_chunk(story, chunk, _take_completion)
    ),
    Api.CHATS: Dialect("/v1/chat/completions", _chat_body, lambda story, chunk: _take_chunk(story, chunk, _take_chat)),
    Api.RESPONSES: Dialect("/v1/responses", _part_body, _take_response),
    Api.MESSAGES: Dialect("/v1/messages", _part_body, _take_message),
    Api.EMBEDDINGS: Dialect("/v1/embeddings", _embedding_body, _take_embedding, streams=False),
}
