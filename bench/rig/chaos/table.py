"""The table that a round prints."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.rig.chaos.bombs import Replies
from bench.rig.chaos.killer import Blow
from bench.rig.chaos.stories import Story
from bench.rig.chaos.verdict import Verdict, standstills
from bench.rig.machine import describe_machine

_MAX_SENTENCES = 20


@dataclass(frozen=True)
class Round:
    """All that a round has shown."""

    seed: int
    seconds: float
    stories: Sequence[Story]
    blows: Sequence[Blow]
    verdict: Verdict
    leaks: Sequence[str]
    clean_s: float  # how long the books took to be clean
    replies: Replies  # to foreign connections


def render(shown: Round) -> str:
    """The table of a round, and below it what was wrong."""
    stories, blows, verdict, leaks = shown.stories, shown.blows, shown.verdict, shown.leaks
    ends = ", ".join(f"{count} {end.value}" for end, count in sorted(verdict.ends.items(), key=lambda each: -each[1]))
    hows = ", ".join(f"{count} {how}" for how, count in sorted(Counter(blow.how for blow in blows).items()))
    lines = [
        describe_machine(),
        f"seed      {shown.seed}",
        f"round     {shown.seconds:.0f} s, {hows}, {verdict.num_streams} streams ({ends})",
        f"          {sum(story.num_reconnects for story in stories)} reconnects over HTTP, by event id or key",
        *_further(shown),
        "",
        "process      blow         times  live  p50 s  p99 s  max s   (silence of live streams, the worst one)",
        *(_row(kind, stories, blows) for kind in sorted({(blow.kind, blow.how) for blow in blows})),
        "",
        f"lost {len(verdict.lost)}  repeated {len(verdict.repeated)}  changed {len(verdict.changed)}  "
        f"leaked {len(leaks)}  (books looked at {shown.clean_s:.1f} s after the last stream)",
    ]
    wrongs = (("lost", verdict.lost), ("repeated", verdict.repeated), ("changed", verdict.changed), ("leaked", leaks))
    for name, sentences in wrongs:
        lines += [f"  {name}: {sentence}" for sentence in sentences[:_MAX_SENTENCES]]
    return "\n".join(lines)


def _further(shown: Round) -> Iterator[str]:
    """The lines that only some rounds have."""
    if num_refusals := sum(story.num_refusals for story in shown.stories):
        num_streams = sum(story.num_refusals > 0 for story in shown.stories)
        yield f"          {num_refusals} times 429 for {num_streams} streams, asked for again with their keys"
    if len(shown.verdict.num_of_models) > 1:
        first, second = (shown.verdict.num_of_models[place] for place in (0, 1))
        yield f"          {first} streams of the first model, {second} of the second"
    if statuses := shown.replies.statuses:
        told = ", ".join(f"{count} times {status or 'nothing'}" for status, count in sorted(statuses.items()))
        yield f"          foreign connections were told {told}; {len(shown.replies.wrong)} wrongly"
        yield from (f"          {sentence}" for sentence in shown.replies.wrong[:_MAX_SENTENCES])


def _row(kind: tuple[str, str], stories: Sequence[Story], blows: Sequence[Blow]) -> str:
    """One kind of process and of blow: over the blows, the silence of the stream that suffered most."""
    hits = [blow for blow in blows if (blow.kind, blow.how) == kind]
    silences = [standstills(stories, blow) for blow in hits]
    worst = sorted(max(each) for each in silences if each)
    figures = [worst[round(share * (len(worst) - 1))] for share in (0.5, 0.99, 1.0)] if worst else []
    num_live = sum(map(len, silences))
    shown = "  ".join(f"{figure:5.2f}" for figure in figures)
    return f"{kind[0]:11}  {kind[1]:11}  {len(hits):5}  {num_live:4}  {shown}"
