"""Clients of `penstock bench chaos` keep all of an event that must be the same for every request like it."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.rig.chaos.dialects import DIALECTS
from bench.rig.chaos.load import take_delta
from bench.rig.chaos.pipeline import EOS_IDS, TEMPLATES, write_model
from bench.rig.chaos.recipes import Api, Recipe, make_recipes
from bench.rig.chaos.stories import End, Sample, Story
from bench.rig.chaos.verdict import Model, judge
from contract.domain import chain
from contract.domain.finish import FinishReason, Usage
from contract.domain.generation_defaults import OPENAI_DEFAULTS
from contract.domain.pooling import PoolingFacts
from contract.domain.rows import TextRow
from gateway_svc.core.apis import APIS
from gateway_svc.core.ask import Form
from gateway_svc.core.formats.call_ids import call_id
from gateway_svc.core.formats.choice import ModelFormats
from gateway_svc.core.formats.reading import OutputReading
from gateway_svc.core.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from gateway_svc.core.replies import ReplyHead
from gateway_svc.core.streams import DeliveredSequence
from penstock.client import ChatDelta, Delta, ToolCallDelta
from tokenizer_svc.core.output_formats import chat_facts
from tokenizer_svc.loading import load_vocabulary

TEXT = '<think>hm</think>I count.<tool_call>{"name": "count", "arguments": {"numbers": [1]}}</tool_call>'
FORMS = {Api.RESPONSES: Form.RESPONSE, Api.MESSAGES: Form.MESSAGE}
PARTED = pytest.mark.parametrize("api", FORMS)


class Models:
    def defaults(self, name: str) -> Any:
        del name
        return OPENAI_DEFAULTS

    def pooling(self, name: str) -> PoolingFacts:
        del name
        return PoolingFacts(size=64)

    def formats(self, name: str) -> ModelFormats:
        del name
        return ModelFormats(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"])


def recipe_of(api: Api) -> Recipe:
    return next(each for each in make_recipes(random.Random(1), 40) if each.api is api)


def story_of(recipe: Recipe, request_id: bytes, cut: int, num_cached: int, text: str = TEXT) -> Story:
    """What a client makes of a stream."""
    form = FORMS[recipe.api]
    api = next(each for each in APIS if each.form is form)
    reading = OutputReading("hermes", "think")
    call_id = form.id_prefix + request_id.hex()
    head = ReplyHead(form, call_id, "m", created_s=request_id[0], num_choices=1, reading=reading, request_id=request_id)
    events = api.events(head, request_id, [DeliveredSequence()])
    events.learn([0], 7)
    first = TextRow(request_id, 0, 0, 0, chain.CHAIN_START, (1,), text[:cut])
    known = chain.extend(chain.CHAIN_START, (1,))
    last = replace(first, token_offset=1, text_offset=cut, chain=known, text=text[cut:], finish=FinishReason.STOP)
    told = events.chunk(0, first, known) + events.chunk(0, last, known) + events.end([Usage(7, 2, num_cached)])
    story = Story(recipe, "gateway-0", 0.0, [Sample()])
    for line in told.decode().splitlines():
        if line.startswith("data: "):
            DIALECTS[recipe.api].take(story, json.loads(line[6:]))
    return story


def num_changed(story: Story, reference: Story) -> int:
    return len(judge([story], [Model(0, {reference.recipe: reference})], []).changed)


@PARTED
def test_an_undisturbed_stream_is_the_same_whatever_its_id_and_cuts(api: Api) -> None:
    recipe = recipe_of(api)
    story, reference = story_of(recipe, b"a" * 16, 20, 0), story_of(recipe, b"b" * 16, 60, 5)
    assert story.end is End.DONE
    assert story.usage == (7, 2)
    assert story.samples[0].text == "I count."
    assert story.samples[0].events == reference.samples[0].events
    assert num_changed(story, reference) == 0


@PARTED
def test_what_is_repeated_lost_or_changed_in_it_is_seen(api: Api) -> None:
    recipe = recipe_of(api)
    reference = story_of(recipe, b"a" * 16, 20, 0)
    assert num_changed(story_of(recipe, b"b" * 16, 20, 0, TEXT.replace("[1]", "[2]")), reference) == 1
    for index in range(len(reference.samples[0].events)):
        for change in ("lost", "repeated"):
            story = story_of(recipe, b"b" * 16, 20, 0)
            events = story.samples[0].events
            events[index : index + 1] = [] if change == "lost" else [events[index]] * 2
            assert num_changed(story, reference) == 1


@PARTED
def test_an_id_that_does_not_follow_from_the_request_is_a_change(api: Api) -> None:
    recipe, prefix = recipe_of(api), {Api.RESPONSES: "fc_", Api.MESSAGES: "toolu_"}[api]
    story = Story(recipe, "gateway-0", 0.0, [Sample()], request_id="a" * 32)
    event = {"type": "content_block_start", "content_block": {"id": prefix + "0" * 24}}
    DIALECTS[api].take(story, event)
    assert story.samples[0].events == [event]


def test_every_recipe_is_a_body_that_its_api_takes() -> None:
    paths = {path: api for api in APIS for path in api.paths}
    for recipe in make_recipes(random.Random(1), 48):
        dialect = DIALECTS[recipe.api]
        body = {"model": "m", "stream": dialect.streams, **dialect.body(recipe)}
        ask = paths[dialect.path].parse(json.dumps(body).encode(), Models())
        assert ask.stream is dialect.streams
        assert ask.pooling == recipe.pooling
        assert ask.params.seed == (recipe.params.seed if dialect.streams else None)


def typed(calls: str, *, name: str = "count", thought: str = "hm") -> Story:
    """The story of a typed chat over gRPC, in two events."""
    recipe = next(each for each in make_recipes(random.Random(1), 40) if each.kind == "typed")
    story = Story(recipe, "gateway-0", 0.0, [Sample()], request_id="a" * 32, end=End.DONE)
    first = ToolCallDelta(0, call_id(bytes.fromhex(story.request_id), 0, 0) if name == "count" else "call_1", "count")
    take_delta(story, Delta(0, 0, (1,), "", chat=ChatDelta(reasoning=thought, tool_calls=(first,))))
    rest = ChatDelta(tool_calls=(ToolCallDelta(0, arguments=calls),), num_reasoning_tokens=3)
    take_delta(story, Delta(0, 1, (2,), "", finish=FinishReason.STOP, chat=rest))
    return story


def test_of_typed_chats_over_grpc_thoughts_calls_and_ids_are_looked_at() -> None:
    reference = typed("[1]")
    assert reference.samples[0].calls == "\n0  count [1]"
    for other in (typed("[2]"), typed("[1]", name="derived otherwise"), typed("[1]", thought="hm?")):
        other.recipe = reference.recipe
        assert num_changed(other, reference) == 1
    same = typed("[1]")
    same.recipe = reference.recipe
    assert num_changed(same, reference) == 0


@pytest.mark.parametrize("chats", TEMPLATES)
def test_the_formats_of_the_served_model_are_found_in_its_template(tmp_path: Path, chats: str) -> None:
    write_model(tmp_path / "model", chats)
    vocabulary = load_vocabulary(str(tmp_path / "model"))
    facts = chat_facts(vocabulary.chat, vocabulary.tokenizer)
    assert (facts.tool_format, facts.reasoning_format) == (chats, "think" if chats == "hermes" else chats)
    assert vocabulary.eos_token_ids == EOS_IDS
