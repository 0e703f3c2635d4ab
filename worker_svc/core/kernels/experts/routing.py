"""Routing: scores of experts, and the best of them for each row. Nothing waits for the host, and what is launched does
not depend on what is chosen.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import has_dependent_launch, options, release, wait

_BLOCK, _LARGE_BLOCK = 16, 64  # rows and experts of a program that scores: the fewest that can be multiplied, and more
_FEWEST_LARGE_ROWS = 1024  # that are scored by larger programs
_INPUTS, _STEPS = 128, 3  # inputs of a step, and steps of a program: few, as each waits for memory
# Of more rows programs have more inputs each, which come in a pipeline; of more yet, more experts.
_FEWEST_MANY_ROWS, _FEWEST_WIDE_ROWS = 4096, 8192
_MANY_INPUTS, _STAGES, _WIDE_BLOCK = 64, 4, 128
_PROGRAMS = 192  # into which their inputs are split, about, where rows and experts make fewer
_MOST_SINGLE_ROWS, _MOST_SINGLE_INPUTS = 8, 8192  # that are scored one by one, without tensor cores
_SINGLE_EXPERTS = 2  # of a program that does so
_ALL_BUT_SIGN, _SMALLEST = tl.constexpr(0x7FFFFFFF), tl.constexpr(-0x80000000)
_TINY = tl.constexpr(1e-20)  # beside the sum that weights are divided by


@dataclass(frozen=True, slots=True)
class Choosing:
    """The rules of a router."""

    top_k: int
    is_sigmoid: bool  # scores are the sigmoids of logits; else their softmax
    renormalizes: bool  # weights of the chosen sum to one
    scale: float  # of weights
    num_groups: int  # of experts, one after the other: those of the best alone can be chosen
    num_chosen_groups: int  # by the best scores in each
    num_group_scores: int = 2  # that are added up for a group: one or two
    is_by_logits: bool = False  # the largest are chosen, whatever their scores


@dataclass(frozen=True, slots=True)
class Routed:
    """The chosen experts of each row. A pair is a row and one of its experts: pair p is of row p // top_k."""

    ids: Tensor  # i32[rows, top_k]
    weights: Tensor  # f32[rows, top_k]


@dataclass(frozen=True, slots=True)
class _Cut:
    """How the scores of some rows are cut into programs."""

    rows: int  # of a program, as the next two
    experts: int
    inputs: int  # of a step
    steps: int
    stages: int  # 1: all steps at once

    @staticmethod
    def of(rows: int, num_experts: int, inputs: int) -> "_Cut":
        """For so many rows, of which not each is scored by itself."""
        if rows < _FEWEST_MANY_ROWS:
            block = _LARGE_BLOCK if rows >= _FEWEST_LARGE_ROWS else _BLOCK
            return _Cut(block, block, _INPUTS, _STEPS, 1)
        most = _WIDE_BLOCK if rows >= _FEWEST_WIDE_ROWS else _LARGE_BLOCK
        experts = max(_BLOCK, min(most, int(triton.next_power_of_2(num_experts))))
        programs = triton.cdiv(rows, _LARGE_BLOCK) * triton.cdiv(num_experts, experts)
        parts = triton.cdiv(_PROGRAMS, programs)
        return _Cut(_LARGE_BLOCK, experts, _MANY_INPUTS, triton.cdiv(inputs, parts * _MANY_INPUTS), _STAGES)


@triton.jit
def _add_scores(acc, xs, weights, is_row, is_expert, inputs, k, K: tl.constexpr):
    """Those of the inputs from k on."""
    is_input = inputs + k < K
    weight = tl.load(weights + k, mask=is_expert[:, None] & is_input[None, :], other=0.0)
    x = tl.load(xs + k, mask=is_row[None, :] & is_input[:, None], other=0.0)
    return tl.dot(weight, x, acc)


# Not compiled again for a number of rows that divides by 16: steps that are no graphs have any.
@triton.jit(do_not_specialize=["M"])
def _score_experts(
    x_ptr,  # [M, K]
    weight_ptr,  # [EXPERTS, K]
    bias_ptr,  # [EXPERTS]
    out_ptr,  # f32[splits, M, EXPERTS]
    M,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    experts = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_expert = rows < M, experts < EXPERTS
    split = tl.program_id(2)
    inputs = split * STEPS * BLOCK_K + tl.arange(0, BLOCK_K)
    xs = x_ptr + rows[None, :].to(tl.int64) * K + inputs[:, None]
    weights = weight_ptr + experts[:, None] * K + inputs[None, :]
    wait(DEPENDENT)
    release(DEPENDENT)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if STAGES == 1:
        for k in tl.static_range(0, STEPS * BLOCK_K, BLOCK_K):
            acc = _add_scores(acc, xs, weights, is_row, is_expert, inputs, k, K)
    else:
        for k in tl.range(0, STEPS * BLOCK_K, BLOCK_K, num_stages=STAGES):
            acc = _add_scores(acc, xs, weights, is_row, is_expert, inputs, k, K)
    if BIAS:
        acc += tl.load(bias_ptr + experts, mask=is_expert & (split == 0), other=0.0).to(tl.float32)[:, None]
    outs = out_ptr + (split * M + rows[None, :]).to(tl.int64) * EXPERTS + experts[:, None]
    tl.store(outs, acc, mask=is_row[None, :] & is_expert[:, None])


@triton.jit
def _score_row(
    x_ptr,  # [rows, K]
    weight_ptr,  # [EXPERTS, K]
    bias_ptr,  # [EXPERTS]
    norm_ptr,  # [K]
    normed_ptr,  # [rows, K]
    out_ptr,  # f32[rows, EXPERTS]
    eps,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,  # of x, which is written, too
    DEPENDENT: tl.constexpr,
):
    """One program for some experts of a row, all inputs at once: weights are there when the row is."""
    row = tl.program_id(0).to(tl.int64)
    experts = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inputs = tl.arange(0, triton.next_power_of_2(K))
    is_expert, is_input = experts < EXPERTS, inputs < K
    is_weight = is_expert[:, None] & is_input[None, :]
    weight = tl.load(weight_ptr + experts[:, None] * K + inputs[None, :], mask=is_weight, other=0.0)
    if NORM:
        norm = tl.load(norm_ptr + inputs, mask=is_input, other=0.0).to(tl.float32)
    wait(DEPENDENT)
    release(DEPENDENT)
    x = tl.load(x_ptr + row * K + inputs, mask=is_input, other=0.0).to(tl.float32)
    if NORM:
        normed = (x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / K + eps)) * norm).to(normed_ptr.dtype.element_ty)
        if tl.program_id(1) == 0:
            tl.store(normed_ptr + row * K + inputs, normed, mask=is_input)
        x = normed.to(tl.float32)
    scores = tl.sum(weight.to(tl.float32) * x[None, :], 1)
    if BIAS:
        scores += tl.load(bias_ptr + experts, mask=is_expert, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * EXPERTS + experts, scores, mask=is_expert)


def scores_singly(rows: int, inputs: int) -> bool:
    """Return whether so many rows are scored one by one, which takes a norm along."""
    return rows <= _MOST_SINGLE_ROWS and inputs <= _MOST_SINGLE_INPUTS


def score_rows(
    x: Tensor, norm: tuple[Tensor, float] | None, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """norm(x) [rows, inputs], and `score_experts` of it, of few rows; norm: weight [inputs] and eps of an RMS norm."""
    rows, inputs = x.shape
    normed = x if norm is None else torch.empty_like(x)
    out = torch.empty(1, rows, len(weight), dtype=torch.float32, device=x.device)
    norm_weight, eps = norm if norm is not None else (x, 0.0)
    dependent = has_dependent_launch(x.device)
    _score_row[(rows, triton.cdiv(len(weight), _SINGLE_EXPERTS))](
        x,
        weight,
        weight if bias is None else bias,
        norm_weight,
        normed,
        out,
        eps,
        K=inputs,
        EXPERTS=len(weight),
        BLOCK=_SINGLE_EXPERTS,
        BIAS=bias is not None,
        NORM=norm is not None,
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )
    return normed, out


def score_experts(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Parts whose sum is x @ weight.T + bias: x [rows, inputs], weight [experts, inputs], bias [experts] -> f32[parts,
    rows, experts].
    """
    rows, inputs = x.shape
    if scores_singly(rows, inputs):
        return score_rows(x, None, weight, bias)[1]
    cut = _Cut.of(rows, len(weight), inputs)
    parts = triton.cdiv(inputs, cut.steps * cut.inputs)
    out = torch.empty(parts, rows, len(weight), dtype=torch.float32, device=x.device)
    dependent = has_dependent_launch(x.device)
    _score_experts[(triton.cdiv(rows, cut.rows), triton.cdiv(len(weight), cut.experts), parts)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        K=inputs,
        EXPERTS=len(weight),
        BLOCK_M=cut.rows,
        BLOCK_N=cut.experts,
        BLOCK_K=cut.inputs,
        STEPS=cut.steps,
        STAGES=cut.stages,
        BIAS=bias is not None,
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )
    return out


@triton.jit
def _in_best_groups(
    choice, experts, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, CHOSEN: tl.constexpr, SCORES: tl.constexpr
):
    """choice, and minus infinity for experts of other groups than the best."""
    groups = experts // (EXPERTS // GROUPS)
    PADDED: tl.constexpr = triton.next_power_of_2(GROUPS)
    numbers = tl.arange(0, PADDED)
    sums = tl.full((PADDED,), float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        own = tl.where(groups == group, choice, float("-inf"))
        best = tl.max(own, 0)
        if SCORES == 2:
            best += tl.max(tl.where(experts == tl.argmax(own, 0), float("-inf"), own), 0)
        sums = tl.where(numbers == group, best, sums)
    is_chosen = experts < 0
    for _ in tl.static_range(CHOSEN):
        group = tl.argmax(sums, 0)
        is_chosen = is_chosen | (groups == group)
        sums = tl.where(numbers == group, float("-inf"), sums)
    return tl.where(is_chosen, choice, float("-inf"))


# Not compiled again for a number of rows that divides by 16: steps that are no graphs have any.
@triton.jit(do_not_specialize=["rows"])
def _choose_experts(
    logits_ptr,  # f32[PARTS, rows, EXPERTS]
    correction_ptr,  # f32[EXPERTS]: added for the choice alone
    ids_ptr,  # i32[rows, TOP_K]
    weights_ptr,  # f32[rows, TOP_K]
    scale,
    rows,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    GROUP_SCORES: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Of experts that are as good the first is chosen, so that a row's do not depend on the rows beside it."""
    row = tl.program_id(0).to(tl.int64)
    PADDED: tl.constexpr = triton.next_power_of_2(EXPERTS)
    experts = tl.arange(0, PADDED)
    is_expert = experts < EXPERTS
    wait(DEPENDENT)
    release(DEPENDENT)
    logits = tl.zeros((PADDED,), tl.float32)
    for part in tl.static_range(PARTS):
        logits += tl.load(logits_ptr + (part * rows + row) * EXPERTS + experts, mask=is_expert, other=float("-inf"))
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        powers = tl.exp(logits - tl.max(logits, 0))
        scores = powers / tl.sum(powers, 0)
    choice = logits if BY_LOGITS else scores
    if CORRECTED:
        choice += tl.load(correction_ptr + experts, mask=is_expert, other=0.0)
    choice = tl.where(is_expert, choice, float("-inf"))
    if GROUPS > 1:
        choice = _in_best_groups(choice, experts, EXPERTS, GROUPS, CHOSEN_GROUPS, GROUP_SCORES)
    PLACES: tl.constexpr = triton.next_power_of_2(TOP_K)
    places = tl.arange(0, PLACES)
    ids = tl.zeros((PLACES,), tl.int32)
    weights = tl.zeros((PLACES,), tl.float32)
    # Integers in the order of the floats, in which zeros are alike: a warp finds the largest in one instruction.
    bits = tl.where(choice == 0.0, 0.0, choice).to(tl.int32, bitcast=True)
    keys = tl.where(is_expert, bits ^ ((bits >> 31) & _ALL_BUT_SIGN), _SMALLEST)
    score_bits = scores.to(tl.int32, bitcast=True)
    for place in tl.static_range(TOP_K):
        # What is no number has a key, too: idle rows name experts.
        best = tl.min(tl.where(keys == tl.max(keys, 0), experts, PADDED), 0)
        is_best = experts == best
        ids = tl.where(places == place, best, ids)
        score = tl.sum(tl.where(is_best, score_bits, 0), 0).to(tl.float32, bitcast=True)
        weights = tl.where(places == place, score, weights)
        keys = tl.where(is_best, _SMALLEST, keys)
    if RENORMALIZES:
        weights = weights / (tl.sum(weights, 0) + _TINY)
    tl.store(ids_ptr + row * TOP_K + places, ids, mask=places < TOP_K)
    tl.store(weights_ptr + row * TOP_K + places, weights * scale, mask=places < TOP_K)


def choose_experts(logits: Tensor, correction: Tensor | None, choosing: Choosing) -> Routed:
    """The best experts of each row: logits f32[parts, rows, experts], which are to be added up, correction
    f32[experts].
    """
    parts, rows, experts = logits.shape
    ids = torch.empty(rows, choosing.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, choosing.top_k, dtype=torch.float32, device=logits.device)
    dependent = has_dependent_launch(logits.device)
    _choose_experts[(rows,)](
        logits,
        logits if correction is None else correction,
        ids,
        weights,
        choosing.scale,
        rows,
        PARTS=parts,
        EXPERTS=experts,
        TOP_K=choosing.top_k,
        SIGMOID=choosing.is_sigmoid,
        RENORMALIZES=choosing.renormalizes,
        CORRECTED=correction is not None,
        GROUPS=choosing.num_groups,
        CHOSEN_GROUPS=choosing.num_chosen_groups,
        GROUP_SCORES=choosing.num_group_scores,
        BY_LOGITS=choosing.is_by_logits,
        DEPENDENT=dependent,
        **options(warps=1, dependent=dependent),
    )
    return Routed(ids, weights)
