"""Tiles of the sampling kernels, as measured best in decode steps on an H200, for every vocabulary and batch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyTiles:
    """Of programs that count what was seen, and change logits."""

    columns: int
    tokens: int  # of a history, counted at a time
    programs: int  # that count a row
    entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobTiles:
    """Of programs that rank a part of a row."""

    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationTiles:
    """Of programs that look at every logit, and of those that find a row's cut."""

    group: int  # columns
    groups: int  # of a program that looks at every logit
    warps: int  # of one that finds a cut, as all that follow
    listing: int  # groups that it lists values of at once
    searching: int  # groups that it searches at once, where there is too much to be listed
    near: int  # groups that it lists the likely values of, at most
    listed: int  # values, at most


PENALTIES = PenaltyTiles(columns=4096, tokens=1024, programs=8, entries=128)
LOGPROBS = LogprobTiles(columns=2048)
TRUNCATION = TruncationTiles(group=128, groups=16, warps=8, listing=32, searching=64, near=256, listed=512)
