"""Experts that are not chosen alike: the share of tokens that choose each, by Zipf's law, and a router that does so."""

import zlib
from functools import cache
from math import exp, sqrt
from statistics import NormalDist

import torch
from torch import Tensor

_ROUNDS = 200  # of halving


@cache
def shares(count: int, top_k: int, exponent: float) -> tuple[float, ...]:
    """The share of tokens that choose each of `count` experts, the most popular first, where each token draws `top_k`
    without putting back and the chance of the one in place n is as n^-exponent; with an exponent of 0 all have as many.

    Tokens that take every expert whose exponential clock, as fast as its chance, rings before a time draw so, if the
    time is such that `top_k` ring in the mean (Efraimidis and Spirakis, 2006, of samples of one size).
    """
    weights = [place**-exponent for place in range(1, count + 1)]
    low, high = 0.0, 1e9
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(1 - exp(-middle * each) for each in weights) < top_k else (low, middle)
    return tuple(1 - exp(-low * each) for each in weights)


def skew_embedding(drawn: Tensor, deviation: float) -> Tensor:
    """[vocab, size] numbers of this deviation -> such of a deviation of 1, so that layers hardly change what they add
    to, but for the first of each token, which is as large as all others together.
    """
    drawn = drawn / deviation
    drawn[:, 0] = sqrt(drawn.shape[1])
    return drawn


def skew_router(drawn: Tensor, deviation: float, top_k: int, exponent: float, name: str) -> Tensor:
    """[experts, size] numbers of this deviation -> a router by which tokens choose experts as `shares` says, which
    expert how often by `name`: the first number of every hidden state is the same (`skew_embedding`, and no layer adds
    to it), the sum of the others is drawn by the normal distribution.
    """
    normal = NormalDist(sigma=deviation)
    found = torch.tensor([normal.inv_cdf(each) for each in shares(len(drawn), top_k, exponent)])
    order = torch.randperm(len(drawn), generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    drawn[:, 0] = found[order].to(drawn)
    return drawn
