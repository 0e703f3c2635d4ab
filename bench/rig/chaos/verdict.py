"""Every stream against the same request undisturbed: lost, repeated, changed, and how long it stood still."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from bench.rig.chaos.killer import Blow
from bench.rig.chaos.pipeline import SERVER
from bench.rig.chaos.recipes import Recipe
from bench.rig.chaos.stories import End, Sample, Story

BROKEN_WITHIN_S = 2.0  # of its gateway's death a stream must have noticed
DEADLY = ("killed", "slow")  # blows that leave a gateway no time to end its streams
_ROUNDING = 1e-5  # of a logprob as JSON has it
AFTERWARDS_S = 0.5  # how long what was on its way may hide a blow


@dataclass(frozen=True)
class Model:
    """One of the models that answer."""

    seed: int
    references: Mapping[Recipe, Story]  # undisturbed


@dataclass
class Verdict:
    """The findings in the stories of a round."""

    num_streams: int = 0
    num_of_models: Counter[int] = field(default_factory=Counter)  # streams that are wholly of one, by its place
    ends: Counter[End] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    @property
    def num_wrong(self) -> int:
        """Streams that were not what they had to be."""
        return len(self.lost) + len(self.repeated) + len(self.changed)


def judge(stories: Sequence[Story], models: Sequence[Model], blows: Sequence[Blow]) -> Verdict:
    """Compares all streams of a round. Each must be wholly of one of the models, whichever."""
    verdict = Verdict(num_of_models=Counter(dict.fromkeys(range(len(models)), 0)))
    # A gateway waits for a server that is away for a while; it has no excuse for turning a request down. Nor is there
    # one for both gateways not to take what is sent again and again with its key.
    may_refuse = any(blow.kind != SERVER for blow in blows)
    for story in stories:
        verdict.ends[story.end] += 1
        if story.end is End.REFUSED and may_refuse and story.recipe.leaves_after:
            continue
        verdict.num_streams += 1
        label = f"{story.recipe.kind} {story.request_id or '?'} over {story.gateway}"
        if why := _loss(story, blows):
            verdict.lost.append(f"{label}: {why}")
        if story.num_repeats:
            verdict.repeated.append(f"{label}: {story.num_repeats} events")
        changes = [_change(story, model) for model in models]
        if "" in changes:
            verdict.num_of_models[changes.index("")] += bool(story.samples[0].text)
        else:
            verdict.changed.append(f"{label}: {'; of the next model: '.join(changes)}")
    return verdict


def check_reference(story: Story, model_seed: int = 0) -> str:
    """The reason why the undisturbed story of a recipe is not what the runner computes; empty: it is."""
    if story.end not in (End.DONE, End.LEFT):
        return f"{story.end.value} {story.error}"
    if story.recipe.is_told and story.prompt_ids != story.recipe.prompt_ids:
        return "the prompt was told otherwise"
    if why := _prompt_difference(story, model_seed, is_whole=True):
        return why
    for index, sample in enumerate(story.samples):
        if not _is_computed(story, index, sample, model_seed):
            return f"sample {index} has other tokens"
    return ""


def standstills(stories: Sequence[Story], blow: Blow) -> list[float]:
    """For each stream that was live when a process was hit: its longest silence around that moment, seconds."""
    found = []
    for story in stories:
        # Before it was let in, a request was not live.
        is_late = story.refused_s < min(story.event_times_s, default=story.ended_s)
        begun_s = max(story.begun_s, story.refused_s) if is_late else story.begun_s
        times_s = [begun_s, *story.event_times_s]
        if story.end not in (End.DONE, End.LEFT) or not begun_s < blow.at_s < story.ended_s:
            continue
        silences = [
            after - before
            for before, after in pairwise(times_s)
            if before <= blow.at_s + AFTERWARDS_S and after > blow.at_s
        ]
        found.append(max(silences, default=0.0))
    return found


def _loss(story: Story, blows: Sequence[Blow]) -> str:
    if story.end in (End.DONE, End.LEFT):
        return ""
    if story.end is End.BROKEN and story.recipe.leaves_after:
        deaths = [
            (blow.at_s, blow.gone_s or blow.at_s) for blow in blows if blow.name == story.gateway and blow.how in DEADLY
        ]
        if any(story.begun_s <= at_s <= story.ended_s <= gone_s + BROKEN_WITHIN_S for at_s, gone_s in deaths):
            return ""
    return f"{story.end.value} {story.error}"


def _is_computed(story: Story, index: int, sample: Sample, model_seed: int) -> bool:
    """Return whether the tokens, where they and their prompt are known, are what the runner computes."""
    if story.recipe.is_chat:
        return True
    tokens = sample.token_ids
    return tokens == [token for token, _ in zip(story.recipe.expected(index, model_seed), tokens, strict=False)]


def _prompt_difference(story: Story, model_seed: int, *, is_whole: bool) -> str:
    """The reason why the prompt's logprobs or its vector are not what the runner computes; empty: they are, as far as
    they came.
    """
    wanted = story.recipe.expected_vector(model_seed)
    if len(story.vector) != len(wanted) and (is_whole or story.vector):
        return f"a vector of {len(story.vector)} dimensions, not of {len(wanted)}"
    if any(abs(one - other) > _ROUNDING for one, other in zip(story.vector, wanted, strict=False)):
        return "the prompt has another vector"
    expected = story.recipe.expected_prompt_logprobs
    told = [{token: logprob for token, (logprob, _) in each.items()} for each in story.prompt_logprobs]
    if len(told) != len(expected) and (is_whole or told):
        return f"logprobs of {len(told)} tokens of the prompt, not of {len(expected)}"
    wrong = [each for each, wanted in zip(told, expected, strict=False) if not _is_near(each, wanted)]
    return f"the prompt has other logprobs: {wrong[0]}" if wrong else ""


def _is_near(told: Mapping[int, float], wanted: Mapping[int, float]) -> bool:
    return told.keys() == wanted.keys() and all(abs(told[token] - wanted[token]) < _ROUNDING for token in wanted)


def _change(story: Story, model: Model) -> str:
    reference = model.references[story.recipe]
    is_whole = story.end is End.DONE
    if story.samples[0].token_ids and story.prompt_ids != reference.prompt_ids:
        return "the prompt was told otherwise"
    for index, (sample, wanted) in enumerate(zip(story.samples, reference.samples, strict=True)):
        if why := _difference(sample, wanted, is_whole=is_whole):
            return f"sample {index} {why}"
        # Beyond what the undisturbed client saw, if it left: what the runner computes.
        if not _is_computed(story, index, sample, model.seed):
            return f"sample {index} has other tokens"
    if is_whole and story.usage != reference.usage:
        return f"usage is {story.usage}, not {reference.usage}"
    if story.fingerprints - reference.fingerprints and reference.fingerprints:
        return f"fingerprints are {sorted(story.fingerprints)}, not {sorted(reference.fingerprints)}"
    return f"{story.num_gaps} gaps" if story.num_gaps else _prompt_difference(story, model.seed, is_whole=is_whole)


def _difference(sample: Sample, wanted: Sample, *, is_whole: bool) -> str:
    for name in ("token_ids", "text", "reasoning", "calls", "logprobs", "events"):
        got, expected = getattr(sample, name), getattr(wanted, name)
        shared = len(got) if is_whole else min(len(got), len(expected))
        if got[:shared] != expected[: len(expected) if is_whole else shared]:
            return f"has other {name}"
    if is_whole and (sample.finish, sample.stop_reason) != (wanted.finish, wanted.stop_reason):
        return f"ended with {sample.finish} {sample.stop_reason!r}, not {wanted.finish} {wanted.stop_reason!r}"
    return ""
