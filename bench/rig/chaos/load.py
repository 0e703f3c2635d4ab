"""Clients that send recipes through the gateways and write down what they saw and when.

All but those that mean to leave go on through any gateway when their connection breaks: after their last event, or,
before the first one, by sending the request again with the same idempotency key. Some connections they drop themselves.
Who is refused, since there are too many already, asks again until there is room: with the same key.
"""

import asyncio
import json
import random
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import httpx

from bench.rig.chaos.pipeline import MODEL, Gateway
from bench.rig.chaos.recipes import Recipe
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.finish import FinishReason
from contract.domain.request import parse_request_id
from gateway_svc.core.formats.call_ids import call_id
from penstock.client import Accepted, AsyncClient, Delta, PromptPart

SILENCE_S = 45.0  # without an event: the stream is lost
_REFUSED_PAUSE_S = 0.2
_RECONNECT_S = 30.0  # without anything new: then a broken connection counts
_RECONNECT_PAUSE_S = 0.1
_DROP_SHARE = 0.2  # of the connections over HTTP
_DROP_AFTER = (1, 120)  # events
_INTERVAL = 8  # tokens of an event, for recipes that say so
CUT_SHORT = "the stream ended without its end mark"


class End(Enum):
    """The end of a stream as its client saw it."""

    DONE = "done"
    LEFT = "left"  # the client went away, as it meant to
    BROKEN = "broken"  # the connection broke
    FAILED = "failed"  # a typed error
    SILENT = "silent"  # nothing came for too long
    REFUSED = "refused"  # never accepted: the gateway was not there


@dataclass
class Sample:
    """One sample as its client saw it."""

    token_ids: list[int] = field(default_factory=list)  # over HTTP only where they are told
    text: str = ""
    reasoning: str = ""  # of a chat
    calls: str = ""  # of a chat: for each its index, its id if that is not the derived one, its name and arguments
    finish: str = ""
    stop_reason: int | str | None = None
    logprobs: list[float] = field(default_factory=list)  # of each token, and after it its alternatives'


@dataclass
class Story:
    """One stream as its client saw it."""

    recipe: Recipe
    gateway: str
    begun_s: float
    samples: list[Sample]
    request_id: str = ""
    event_times_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    end: End = End.SILENT
    error: str = ""
    usage: tuple[int, int] | None = None  # prompt and output tokens
    num_repeats: int = 0  # events that begin before the end of what came already
    num_gaps: int = 0  # events that begin after it
    last_event_id: str = ""  # over HTTP
    num_reconnects: int = 0  # over HTTP
    num_refusals: int = 0  # 429 or 503, after which the request was sent again with its key
    refused_s: float = 0.0  # when it was last told to come again later
    prompt_ids: tuple[int, ...] = ()  # as they were told
    fingerprints: set[str] = field(default_factory=set)  # of models, over HTTP
    # Of each token of the prompt but the first, by token: logprob and rank.
    prompt_logprobs: list[dict[int, tuple[float, int | None]]] = field(default_factory=list)

    @property
    def heard_s(self) -> float:
        """The time at which something was last heard of it."""
        return max(self.begun_s, self.refused_s, *self.event_times_s[-1:])

    def refuse(self) -> None:
        """It was told to come again later."""
        self.num_refusals += 1
        self.refused_s = time.monotonic()


class Caller:
    """The way in which one client reaches the gateways, and how often it drops what it has."""

    def __init__(self, gateways: Sequence[Gateway], seed: int | None = None, model: str = MODEL) -> None:
        """With a seed, connections are dropped, and the next one goes to any of the gateways."""
        self._gateways = gateways
        self.model = model  # that is asked for
        self._rng = random.Random(seed)
        self._drops = seed is not None

    def gateway(self) -> Gateway:
        """The one that is called next."""
        return self._rng.choice(self._gateways)

    def addresses(self, first: Gateway) -> str:
        """Of all gateways over gRPC, this one before the others."""
        others = [each for each in self._gateways if each is not first]
        return ",".join(each.grpc_address for each in (first, *others))

    def drop_after(self) -> int:
        """After how many events the next connection is dropped; 0: not at all."""
        return self._rng.randint(*_DROP_AFTER) if self._drops and self._rng.random() < _DROP_SHARE else 0


async def follow(
    recipe: Recipe, caller: Caller, *, silence_s: float = SILENCE_S, begun: Callable[[Story], None] | None = None
) -> Story:
    """Sends one request and reads its stream to whatever end it has; `begun` is told of the story before that."""
    samples = [Sample() for _ in range(recipe.params.n)]
    gateway = caller.gateway()
    story = Story(recipe, gateway.name, time.monotonic(), samples)
    if begun is not None:
        begun(story)
    task = asyncio.ensure_future((_read_http if recipe.is_http else _read_grpc)(story, gateway, caller))
    while not task.done():
        left_s = story.heard_s + silence_s - time.monotonic()
        if left_s <= 0:
            task.cancel()
        await asyncio.wait({task}, timeout=max(left_s, 0.05))
    if not task.cancelled():
        task.result()
    story.ended_s = time.monotonic()
    return story


async def follow_for_ever(
    recipes: Sequence[Recipe], gateways: Sequence[Gateway], seed: int, book: "Book", model: str = MODEL
) -> None:
    """One client: request after request until the book closes; refused ones are tried elsewhere."""
    rng, caller = random.Random(seed), Caller(gateways, seed, model)
    while not book.is_closed:
        story = await follow(rng.choice(recipes), caller)
        book.stories.append(story)
        if story.end is End.REFUSED:
            await asyncio.sleep(_REFUSED_PAUSE_S)


@dataclass
class Book:
    """All stories of a round."""

    stories: list[Story] = field(default_factory=list)
    is_closed: bool = False


async def _read_grpc(story: Story, gateway: Gateway, caller: Caller) -> None:
    key = None if story.recipe.leaves_after else secrets.token_hex(16)
    while await _is_refused_over_grpc(story, gateway, caller, key):
        await asyncio.sleep(_RECONNECT_PAUSE_S)
        gateway = caller.gateway()
        story.gateway = gateway.name


async def _is_refused_over_grpc(story: Story, gateway: Gateway, caller: Caller, key: str | None) -> bool:
    """Calls once, and reads the stream to its end if it begins; whether there was no room for it."""
    recipe = story.recipe
    is_resumable = not recipe.leaves_after
    async with (
        AsyncClient(caller.addresses(gateway) if is_resumable else gateway.grpc_address) as client,
        aclosing(
            client.generate(
                list(recipe.prompt_ids),
                recipe.params,
                model=caller.model,
                resumable=is_resumable,
                idempotency_key=key,
                stream_interval=_INTERVAL if recipe.is_told else 0,
                return_prompt_token_ids=recipe.is_told,
            )
        ) as events,
    ):
        try:
            async for event in events:
                story.event_times_s.append(time.monotonic())
                if isinstance(event, Accepted):
                    story.request_id = event.request_id
                    story.prompt_ids = story.prompt_ids or event.prompt_token_ids
                    continue
                if isinstance(event, PromptPart):
                    _take_prompt(story, event)
                    continue
                _take_delta(story, event)
                if 0 < recipe.leaves_after <= len(story.samples[0].token_ids):
                    story.end = End.LEFT
                    return False
        except PenstockError as error:
            if error.code is ErrorCode.OVERLOADED and not story.request_id:
                story.refuse()
                return True
            # A gateway says what is wrong; a connection that broke has only a gRPC status.
            is_told = "cannot be reached" not in error.message
            story.error = f"{error.code.name}: {error.message}"
            story.end = End.FAILED if is_told else End.BROKEN if story.request_id else End.REFUSED
            if is_told and error.code is ErrorCode.UNAVAILABLE and not story.request_id:
                story.end = End.REFUSED
            return False
    story.end = End.DONE
    return False


def _take_prompt(story: Story, part: PromptPart) -> None:
    story.num_gaps += part.position != 1 + len(story.prompt_logprobs)
    story.prompt_logprobs += [
        {token: (each.logprob, each.rank) for token, each in one.items()} for one in part.logprobs
    ]


def _take_delta(story: Story, delta: Delta) -> None:
    sample = story.samples[delta.sequence]
    story.num_repeats += delta.token_offset < len(sample.token_ids)
    story.num_gaps += delta.token_offset > len(sample.token_ids)
    sample.token_ids += delta.token_ids
    sample.text += delta.text
    sample.logprobs += [value for each in delta.logprobs for value in (each.logprob, *(top for _, top in each.top))]
    if delta.finish is not FinishReason.UNSPECIFIED:
        sample.finish, sample.stop_reason = delta.finish.name.lower(), delta.stop_reason
    if delta.usage is not None:
        story.usage = delta.usage.num_prompt_tokens, delta.usage.num_output_tokens


async def _read_http(story: Story, gateway: Gateway, caller: Caller) -> None:
    recipe, params = story.recipe, story.recipe.params
    path = "/v1/completions" if recipe.chat is None else "/v1/chat/completions"
    body = {
        "model": caller.model,
        **({"prompt": list(recipe.prompt_ids)} if recipe.chat is None else recipe.chat),
        "n": params.n,
        "temperature": params.temperature,
        "seed": params.seed,
        "max_tokens": params.max_tokens,
        "ignore_eos": params.ignore_eos,
        "stop": list(params.stop or ()) or None,
        "logprobs": params.logprobs,
        "logprob_token_ids": list(params.logprob_token_ids or ()) or None,
        "prompt_logprobs": params.prompt_logprobs,
        "structured_outputs": params.structured_outputs and {"regex": params.structured_outputs.regex},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if recipe.is_told:
        body |= {"echo": True, "return_token_ids": True, "stream_interval": _INTERVAL}
    headers = {} if recipe.leaves_after else {"idempotency-key": secrets.token_hex(16)}
    async with httpx.AsyncClient(timeout=None) as client:
        while True:
            began_s = time.monotonic()
            try:
                if story.last_event_id:
                    url = f"{gateway.http_url}/v1/requests/{story.request_id}/events"
                    call = client.stream("GET", url, headers={"last-event-id": story.last_event_id})
                else:
                    call = client.stream("POST", f"{gateway.http_url}{path}", json=body, headers=headers)
                async with call as reply:
                    await _read_events(story, reply, 0 if recipe.leaves_after else caller.drop_after())
            except httpx.TransportError as error:
                story.error = repr(error)
                story.end = End.BROKEN if story.event_times_s else End.REFUSED
            is_over = time.monotonic() - story.heard_s > _RECONNECT_S
            gives_up = recipe.leaves_after and story.refused_s < began_s
            if gives_up or is_over or story.end not in (End.BROKEN, End.REFUSED):
                return
            story.num_reconnects += 1
            await asyncio.sleep(_RECONNECT_PAUSE_S)
            gateway = caller.gateway()
            story.gateway = gateway.name


async def _read_events(story: Story, reply: httpx.Response, drop_after: int) -> None:
    """Reads one connection to its end, or drops it after so many events."""
    if reply.status_code != 200:
        story.error = f"{reply.status_code}: {(await reply.aread()).decode()}"
        story.end = End.FAILED
        if reply.status_code in (429, 503):
            story.end = End.BROKEN if story.event_times_s else End.REFUSED
        if reply.status_code == 429:
            story.refuse()
        return
    num_events = 0
    event_id = ""
    async for line in reply.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "data":
            if _take_line(story, value):
                return
            # Not before: an event of which only the id came has not come.
            story.last_event_id = event_id
            num_events += 1
            if num_events == drop_after:
                break
    story.end, story.error = End.BROKEN, CUT_SHORT


def _take_chat_delta(story: Story, sample: Sample, choice: dict[str, Any]) -> None:
    delta = choice["delta"]
    sample.text += delta.get("content") or ""
    sample.reasoning += delta.get("reasoning") or ""
    for call in delta.get("tool_calls", ()):
        if "id" in call:
            derived = call_id(parse_request_id(story.request_id), choice["index"], call["index"])
            sample.calls += f"\n{call['index']} {call['id'].replace(derived, '')} {call['function']['name']} "
        sample.calls += call["function"]["arguments"]


def _take_line(story: Story, data: str) -> bool:
    """Return whether nothing more is read."""
    story.event_times_s.append(time.monotonic())
    if data == "[DONE]":
        story.end = End.DONE
        return True
    chunk = json.loads(data)
    if "error" in chunk:
        is_away = chunk["error"]["code"] == "unavailable"
        story.end, story.error = End.BROKEN if is_away else End.FAILED, chunk["error"]["message"]
        if chunk["error"]["code"] == "unavailable":  # this gateway: it goes
            story.end = End.BROKEN
        return True
    story.request_id = chunk["id"]
    if "system_fingerprint" in chunk:
        story.fingerprints.add(chunk["system_fingerprint"])
    if chunk.get("usage"):
        story.usage = chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]
    for choice in chunk["choices"]:
        sample = story.samples[choice["index"]]
        if story.recipe.chat is None:
            sample.text += choice["text"]
        else:
            _take_chat_delta(story, sample, choice)
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
    if 0 < story.recipe.leaves_after <= story.samples[0].text.count(" "):
        story.end = End.LEFT
        return True
    return False
