"""The judge of `penstock bench chaos` sees what it is there to see."""

import random
from copy import deepcopy
from dataclasses import replace
from itertools import islice

import pytest

from bench.rig.chaos.killer import Blow
from bench.rig.chaos.recipes import Recipe, make_recipes
from bench.rig.chaos.stories import End, Sample, Story
from bench.rig.chaos.verdict import BROKEN_WITHIN_S, Model, check_reference, judge, standstills


@pytest.fixture
def recipe() -> Recipe:
    return next(each for each in make_recipes(random.Random(1), 160) if each.kind == "samples" and not each.is_http)


@pytest.fixture
def reference(recipe: Recipe) -> Story:
    samples = [
        Sample(list(islice(recipe.expected(index), 9)), "some text", "length") for index in range(recipe.params.n)
    ]
    return Story(recipe, "gateway-0", 0.0, samples, "id", [1.0, 2.0, 3.0], 3.0, End.DONE, usage=(5, 18))


def found(reference: Story, story: Story, *blows: Blow) -> tuple[int, int, int]:
    verdict = judge([story], [Model(0, {reference.recipe: reference})], blows)
    return len(verdict.lost), len(verdict.repeated), len(verdict.changed)


def changed(reference: Story, **fields: object) -> Story:
    story = Story(**{**vars(deepcopy(reference)), "recipe": reference.recipe})
    for name, value in fields.items():
        setattr(story, name, value)
    return story


def test_a_refusal_is_excused_by_anything_but_a_dead_server_to_who_does_not_ask_again(reference: Story) -> None:
    story = changed(reference, end=End.REFUSED, error="503")
    dead_server, dead_gateway = Blow("server", "server", "cut", 1.0), Blow("gateway", "gateway-0", "killed", 1.0)
    assert found(reference, story, dead_server, dead_gateway) == (1, 0, 0)
    reference.recipe = replace(reference.recipe, leaves_after=500)
    story = changed(reference, end=End.REFUSED, error="503")
    assert found(reference, story, dead_server, dead_gateway) == (0, 0, 0)
    assert found(reference, story, dead_server) == (1, 0, 0)


def test_an_equal_stream_is_right(reference: Story) -> None:
    assert check_reference(reference) == ""
    assert found(reference, changed(reference)) == (0, 0, 0)


def test_streams_that_end_in_any_other_way_are_lost(reference: Story) -> None:
    for end in (End.SILENT, End.FAILED, End.BROKEN):
        assert found(reference, changed(reference, end=end)) == (1, 0, 0)


def test_only_who_cannot_go_on_may_break_and_only_by_the_recent_death_of_its_own_gateway(reference: Story) -> None:
    death = Blow("gateway", "gateway-0", "killed", 2.5)
    assert found(reference, changed(reference, end=End.BROKEN), death) == (1, 0, 0)
    reference.recipe = replace(reference.recipe, leaves_after=500)
    broken = changed(reference, end=End.BROKEN)
    assert found(reference, broken, death) == (0, 0, 0)
    assert found(reference, broken, replace(death, how="slow")) == (0, 0, 0)
    late = changed(reference, end=End.BROKEN, ended_s=death.at_s + BROKEN_WITHIN_S + 0.1)
    assert found(reference, late, death) == (1, 0, 0)
    for blow in (
        Blow("gateway", "gateway-1", "killed", 2.5),
        Blow("gateway", "gateway-0", "paused", 2.5),
    ):
        assert found(reference, broken, blow) == (1, 0, 0)


def test_repeats_gaps_and_wrong_usage_are_seen(reference: Story) -> None:
    assert found(reference, changed(reference, num_repeats=1)) == (0, 1, 0)
    assert found(reference, changed(reference, num_gaps=1)) == (0, 0, 1)
    assert found(reference, changed(reference, usage=(10, 36))) == (0, 0, 1)


@pytest.mark.parametrize("end", [End.DONE, End.LEFT])
def test_other_tokens_are_seen_in_any_sample(reference: Story, end: End) -> None:
    story = changed(reference, end=end)
    story.samples[1].token_ids[3] += 1
    assert found(reference, story) == (0, 0, 1)


def test_an_answer_is_of_one_model_or_another_and_never_of_both(recipe: Recipe, reference: Story) -> None:
    samples = [Sample(list(islice(recipe.expected(index, 7), 9)), "other text", "length") for index in range(2)]
    second = changed(reference, samples=samples)
    assert check_reference(second, 7) == ""
    assert check_reference(second)
    models = [Model(0, {recipe: reference}), Model(7, {recipe: second})]
    mixed = changed(reference, samples=[reference.samples[0], second.samples[1]])
    verdict = judge([second, reference, mixed, second], models, [])
    assert len(verdict.changed) == 1
    assert verdict.num_of_models == {0: 1, 1: 2}


def test_a_fingerprint_is_that_of_the_model_that_answered(reference: Story) -> None:
    reference.fingerprints = {"one"}
    assert found(reference, changed(reference, fingerprints={"one", "other"})) == (0, 0, 1)


def test_what_is_missing_at_the_end_counts_only_for_whole_streams(reference: Story) -> None:
    story = changed(reference)
    story.samples[0].text = "some"
    assert found(reference, story) == (0, 0, 1)
    story.end = End.LEFT
    assert found(reference, story) == (0, 0, 0)


def test_a_standstill_is_the_longest_silence_around_a_blow(reference: Story) -> None:
    story = changed(reference, event_times_s=[1.0, 1.2, 4.0, 9.0], ended_s=9.0)
    assert standstills([story], Blow("worker", "worker-0", "killed", 1.1)) == pytest.approx([2.8])
    assert standstills([story], Blow("worker", "worker-0", "killed", 9.5)) == []
