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
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

import httpx

from bench.rig.chaos.dialects import DIALECTS, INTERVAL, told_call
from bench.rig.chaos.pipeline import MODEL, Gateway
from bench.rig.chaos.recipes import Recipe
from bench.rig.chaos.stories import End, Sample, Story
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.finish import FinishReason
from contract.domain.pooling import PoolingParams
from penstock.client import Accepted, AsyncClient, ChatDelta, Delta, PromptPart
from penstock.client.chats import ChatOptions
from penstock.client.events import Event

SILENCE_S = 45.0  # without an event: the stream is lost
_REFUSED_PAUSE_S = 0.2
_RECONNECT_S = 30.0  # without anything new: then a broken connection counts
_RECONNECT_PAUSE_S = 0.1
_DROP_SHARE = 0.2  # of the connections over HTTP
_DROP_AFTER = (1, 120)  # events
CUT_SHORT = "the stream ended without its end mark"


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
    call = _is_refused_over_grpc if story.recipe.pooling is None else _is_not_embedded
    while await call(story, gateway, caller, key):
        await asyncio.sleep(_RECONNECT_PAUSE_S)
        gateway = caller.gateway()
        story.gateway = gateway.name


async def _is_refused_over_grpc(story: Story, gateway: Gateway, caller: Caller, key: str | None) -> bool:
    """Calls once, and reads the stream to its end if it begins; whether there was no room for it."""
    recipe = story.recipe
    is_resumable = not recipe.leaves_after
    async with (
        AsyncClient(caller.addresses(gateway) if is_resumable else gateway.grpc_address) as client,
        aclosing(_events_of(client, recipe, caller.model, key)) as events,
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
                take_delta(story, event)
                if 0 < recipe.leaves_after <= len(story.samples[0].token_ids):
                    story.end = End.LEFT
                    return False
        except PenstockError as error:
            if error.code is ErrorCode.OVERLOADED and not story.request_id:
                story.refuse()
                return True
            # A gateway says what is wrong; a connection that broke has only a gRPC status.
            is_told = "cannot be reached" not in error.message
            end = End.FAILED if is_told else End.BROKEN if story.request_id else End.REFUSED
            if is_told and error.code is ErrorCode.UNAVAILABLE and not story.request_id:
                end = End.REFUSED
            story.fail(end, f"{error.code.name}: {error.message}")
            return False
    story.end = End.DONE
    return False


def _events_of(client: AsyncClient, recipe: Recipe, model: str, key: str | None) -> AsyncGenerator[Event, None]:
    """A call of a recipe, which outlives its connection if it has a key."""
    if recipe.is_chat:
        asked = {name: value for name, value in recipe.asked.items() if name != "messages"}
        options = cast(ChatOptions, asked | {"model": model, "resumable": key is not None, "idempotency_key": key})
        return client.stream_chat(recipe.asked["messages"], recipe.params, **options)
    return client.generate(
        list(recipe.prompt_ids),
        recipe.params,
        model=model,
        resumable=key is not None,
        idempotency_key=key,
        stream_interval=INTERVAL if recipe.is_told else 0,
        return_prompt_token_ids=recipe.is_told,
    )


async def _is_not_embedded(story: Story, gateway: Gateway, caller: Caller, key: str | None) -> bool:
    """Calls once for a vector; whether the call must be made again: the key says that it is the same."""
    pooling = story.recipe.pooling
    assert pooling is not None
    params = PoolingParams(pooling.kind.name, pooling.normalize, pooling.dimensions or None)
    async with AsyncClient(gateway.grpc_address) as client:
        try:
            told = await client.embed(list(story.recipe.prompt_ids), params, model=caller.model, idempotency_key=key)
        except PenstockError as error:
            if error.code is ErrorCode.OVERLOADED:
                story.refuse()
                return True
            is_away = error.code is ErrorCode.UNAVAILABLE
            story.fail(End.REFUSED if is_away else End.FAILED, f"{error.code.name}: {error.message}")
            return is_away and time.monotonic() - story.heard_s < _RECONNECT_S
    story.event_times_s.append(time.monotonic())
    story.request_id, story.vector = told.request_id, told.embedding
    story.usage = told.usage.num_prompt_tokens, told.usage.num_output_tokens
    story.end, story.error = End.DONE, ""
    return False


def _take_prompt(story: Story, part: PromptPart) -> None:
    story.num_gaps += part.position != 1 + len(story.prompt_logprobs)
    story.prompt_logprobs += [
        {token: (each.logprob, each.rank) for token, each in one.items()} for one in part.logprobs
    ]


def take_delta(story: Story, delta: Delta) -> None:
    """Writes down what an event over gRPC adds to a story."""
    sample = story.samples[delta.sequence]
    story.num_repeats += delta.token_offset < len(sample.token_ids)
    story.num_gaps += delta.token_offset > len(sample.token_ids)
    sample.token_ids += delta.token_ids
    sample.text += delta.text
    if delta.chat is not None:
        _take_parts(story, sample, delta.sequence, delta.chat)
    sample.logprobs += [value for each in delta.logprobs for value in (each.logprob, *(top for _, top in each.top))]
    if delta.finish is not FinishReason.UNSPECIFIED:
        sample.finish, sample.stop_reason = delta.finish.name.lower(), delta.stop_reason
    if delta.usage is not None:
        story.usage = delta.usage.num_prompt_tokens, delta.usage.num_output_tokens


def _take_parts(story: Story, sample: Sample, choice: int, more: ChatDelta) -> None:
    """Write down an event of an output that is told in parts."""
    sample.text += more.content
    sample.reasoning += more.reasoning
    for call in more.tool_calls:
        sample.calls += told_call(story, choice, call.index, call.id, call.name) if call.id else ""
        sample.calls += call.arguments
    if more.num_reasoning_tokens is not None:
        sample.events.append({"reasoning_tokens": more.num_reasoning_tokens})


async def _read_http(story: Story, gateway: Gateway, caller: Caller) -> None:
    recipe, dialect = story.recipe, DIALECTS[story.recipe.api]
    body = {"model": caller.model, "stream": dialect.streams, **dialect.body(recipe)}
    headers = {} if recipe.leaves_after else {"idempotency-key": secrets.token_hex(16)}
    async with httpx.AsyncClient(timeout=None) as client:
        while True:
            began_s = time.monotonic()
            try:
                if story.last_event_id:
                    url = f"{gateway.http_url}/v1/requests/{story.request_id}/events"
                    call = client.stream("GET", url, headers={"last-event-id": story.last_event_id})
                else:
                    call = client.stream("POST", f"{gateway.http_url}{dialect.path}", json=body, headers=headers)
                async with call as reply:
                    await _read_events(story, reply, 0 if recipe.leaves_after else caller.drop_after())
            except httpx.TransportError as error:
                story.fail(End.BROKEN if story.event_times_s else End.REFUSED, repr(error))
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
        error, end = f"{reply.status_code}: {(await reply.aread()).decode()}", End.FAILED
        if reply.status_code in (429, 503):
            end = End.BROKEN if story.event_times_s else End.REFUSED
        story.fail(end, error)
        if reply.status_code == 429:
            story.refuse()
        return
    if not (dialect := DIALECTS[story.recipe.api]).streams:
        dialect.take(story, json.loads(await reply.aread()))
        story.event_times_s.append(time.monotonic())
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
    story.fail(End.BROKEN, CUT_SHORT)


def _take_line(story: Story, data: str) -> bool:
    """Return whether nothing more is read."""
    story.event_times_s.append(time.monotonic())
    story.end = End.SILENT
    if data == "[DONE]":
        story.end = End.DONE
    else:
        DIALECTS[story.recipe.api].take(story, json.loads(data))
    if story.end is End.SILENT and 0 < story.recipe.leaves_after <= story.samples[0].text.count(" "):
        story.end = End.LEFT
    return story.end is not End.SILENT
