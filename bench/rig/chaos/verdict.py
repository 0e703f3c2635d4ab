"""Every stream against the same request undisturbed: lost, repeated, changed, and how long it stood still."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from bench.rig.chaos.killer import Blow
from bench.rig.chaos.load import End, Sample, Story
from bench.rig.chaos.pipeline import SERVER
from bench.rig.chaos.recipes import Recipe

BROKEN_WITHIN_S = 2.0  # of its gateway's death a stream must have noticed
AFTERWARDS_S = 0.5  # how long what was on its way may hide a blow


@dataclass
class Verdict:
    """What was found in the stories of a round."""

    num_streams: int = 0
    ends: Counter[End] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    @property
    def num_wrong(self) -> int:
        """Streams that were not what they had to be."""
        return len(self.lost) + len(self.repeated) + len(self.changed)


def judge(stories: Sequence[Story], references: Mapping[Recipe, Story], blows: Sequence[Blow]) -> Verdict:
    """Compares all streams of a round."""
    verdict = Verdict()
    # A gateway waits for a server that is away for a while; it has no excuse for turning a request down.
    may_refuse = any(blow.kind != SERVER for blow in blows)
    for story in stories:
        verdict.ends[story.end] += 1
        if story.end is End.REFUSED and may_refuse:
            continue
        verdict.num_streams += 1
        label = f"{story.recipe.kind} {story.request_id or '?'} over {story.gateway}"
        if why := _loss(story, blows):
            verdict.lost.append(f"{label}: {why}")
        if story.num_repeats:
            verdict.repeated.append(f"{label}: {story.num_repeats} events")
        if why := _change(story, references[story.recipe]):
            verdict.changed.append(f"{label}: {why}")
    return verdict


def check_reference(story: Story) -> str:
    """Why the undisturbed story of a recipe is not what the runner computes; empty: it is."""
    if story.end not in (End.DONE, End.LEFT):
        return f"{story.end.value} {story.error}"
    for index, sample in enumerate(story.samples):
        tokens = sample.token_ids
        if tokens != [token for token, _ in zip(story.recipe.expected(index), tokens, strict=False)]:
            return f"sample {index} has other tokens"
    return ""


def standstills(stories: Sequence[Story], blow: Blow) -> list[float]:
    """For each stream that was live when a process was hit: its longest silence around that moment, seconds."""
    found = []
    for story in stories:
        times_s = [story.begun_s, *story.event_times_s]
        if story.end not in (End.DONE, End.LEFT) or not story.begun_s < blow.at_s < story.ended_s:
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
        deaths_s = [blow.at_s for blow in blows if blow.name == story.gateway and blow.how == "killed"]
        if any(story.begun_s <= at_s <= story.ended_s <= at_s + BROKEN_WITHIN_S for at_s in deaths_s):
            return ""
    return f"{story.end.value} {story.error}"


def _change(story: Story, reference: Story) -> str:
    is_whole = story.end is End.DONE
    for index, (sample, wanted) in enumerate(zip(story.samples, reference.samples, strict=True)):
        if why := _difference(sample, wanted, is_whole=is_whole):
            return f"sample {index} {why}"
        tokens = sample.token_ids
        # Beyond what the undisturbed client saw, if it left: what the runner computes.
        if tokens != [token for token, _ in zip(story.recipe.expected(index), tokens, strict=False)]:
            return f"sample {index} has other tokens"
    if is_whole and story.usage != reference.usage:
        return f"usage is {story.usage}, not {reference.usage}"
    return f"{story.num_gaps} gaps" if story.num_gaps else ""


def _difference(sample: Sample, wanted: Sample, *, is_whole: bool) -> str:
    for name in ("token_ids", "text", "logprobs"):
        got, expected = getattr(sample, name), getattr(wanted, name)
        shared = len(got) if is_whole else min(len(got), len(expected))
        if got[:shared] != expected[: len(expected) if is_whole else shared]:
            return f"has other {name}"
    if is_whole and (sample.finish, sample.stop_reason) != (wanted.finish, wanted.stop_reason):
        return f"ended with {sample.finish} {sample.stop_reason!r}, not {wanted.finish} {wanted.stop_reason!r}"
    return ""
