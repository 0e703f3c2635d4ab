"""Products of rows with the weights of their experts, grouped by expert: a program has a tile of the pairs of one,
wherever their rows are. There are as many programs as the worst routing needs; those without a tile leave at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.experts.activation import ACTIVATIONS
from worker_svc.core.kernels.experts.routing import Routed
from worker_svc.core.kernels.experts.sorting import SortedPairs
from worker_svc.core.kernels.experts.tile_products import gate_tile, multiply_tile
from worker_svc.core.kernels.experts.tuning import Tile, tile_for
from worker_svc.core.kernels.experts.weights import FLOATS, FP4, INT4, ExpertWeights, operands
from worker_svc.core.kernels.launch import has_dependent_launch, options, power_of_two_divisor, release, wait
from worker_svc.core.kernels.words import BLOCK

_COLUMNS = 1024  # of a program that adds up
_TILED_BYTES = 2  # of a number that tiles are for


def most_tiles(num_pairs: int, num_experts: int, tile: Tile) -> int:
    """As many as any routing needs: each expert that has pairs may have a tile that is not full."""
    used = min(num_pairs, num_experts)
    return (num_pairs - used) // tile.pairs + used


@triton.jit
def _find_tile(counts_ptr, firsts_ptr, tile, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile, how many pairs are left to it (none after the last tile), and where they begin."""
    PADDED: tl.constexpr = triton.next_power_of_2(EXPERTS)
    experts = tl.arange(0, PADDED)
    counts = tl.load(counts_ptr + experts, mask=experts < EXPERTS, other=0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    is_own = experts == expert
    skipped = (tile - tl.sum(tl.where(is_own, ends - tiles, 0), 0)) * BLOCK_M
    first = tl.load(firsts_ptr + tl.minimum(expert, EXPERTS - 1)) + skipped
    return expert.to(tl.int64), tl.sum(tl.where(is_own, counts, 0), 0) - skipped, first


@triton.jit
def _gate_tiles(
    x_ptr,  # [rows, K]
    numbers_ptr,  # see `ExpertWeights`, as the next: of [EXPERTS, 2 N, K], gates then ups
    exponents_ptr,
    scales_ptr,
    bias_ptr,  # [EXPERTS, 2 N]
    order_ptr,
    counts_ptr,
    firsts_ptr,
    weights_ptr,  # f32[pairs]
    out_ptr,  # [pairs, N]
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SHORT: tl.constexpr,  # pairs up to which a tile is but so large; 0: there is one size
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,  # FP8, INT4: inputs that share a scale, which of FP8 a step's do; 0: all
    SCALED: tl.constexpr,  # INT4: scales are multiplied with numbers, and not with sums
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,  # rows of x are multiplied by the weights
    SORTED: tl.constexpr,  # out has pairs as the order has them
    DEPENDENT: tl.constexpr,
):
    """The weight is the tall operand of the products, so that pairs need not be padded to its height."""
    wait(DEPENDENT)
    release(DEPENDENT)
    expert, count, first = _find_tile(counts_ptr, firsts_ptr, tl.program_id(1), EXPERTS, BLOCK_M)
    if count > SHORT:
        gate_tile(
            x_ptr, numbers_ptr, exponents_ptr, scales_ptr, bias_ptr, order_ptr, weights_ptr, out_ptr, expert, count,
            first, N, K, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, WARPS, FORM, GROUP, SCALED, ACTIVATION, BIAS,
            WEIGHS, SORTED,
        )  # fmt: skip
    elif count > 0:  # noqa: SIM102  (what the compiler knows stands alone, so that it leaves the rest out)
        if SHORT > 0:
            gate_tile(
                x_ptr, numbers_ptr, exponents_ptr, scales_ptr, bias_ptr, order_ptr, weights_ptr, out_ptr, expert,
                count, first, N, K, TOP_K, SHORT, BLOCK_N, BLOCK_K, STAGES, WARPS, FORM, GROUP, SCALED, ACTIVATION,
                BIAS, WEIGHS, SORTED,
            )  # fmt: skip


@triton.jit
def _multiply_tiles(
    x_ptr,  # [pairs, K]
    numbers_ptr,  # see `ExpertWeights`, as the next: of [EXPERTS, N, K]
    exponents_ptr,
    scales_ptr,
    bias_ptr,  # [EXPERTS, N]
    order_ptr,
    counts_ptr,
    firsts_ptr,
    weights_ptr,  # f32[pairs]
    out_ptr,  # [pairs, N]
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SHORT: tl.constexpr,  # pairs up to which a tile is but so large; 0: there is one size
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,  # products are multiplied by the weights
    DEPENDENT: tl.constexpr,
):
    """See `_gate_tiles`."""
    wait(DEPENDENT)
    release(DEPENDENT)
    expert, count, first = _find_tile(counts_ptr, firsts_ptr, tl.program_id(1), EXPERTS, BLOCK_M)
    if count > SHORT:
        multiply_tile(
            x_ptr, numbers_ptr, exponents_ptr, scales_ptr, bias_ptr, order_ptr, weights_ptr, out_ptr, expert, count,
            first, N, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, WARPS, FORM, GROUP, SCALED, BIAS, WEIGHS,
        )  # fmt: skip
    elif count > 0:  # noqa: SIM102  (what the compiler knows stands alone, so that it leaves the rest out)
        if SHORT > 0:
            multiply_tile(
                x_ptr, numbers_ptr, exponents_ptr, scales_ptr, bias_ptr, order_ptr, weights_ptr, out_ptr, expert,
                count, first, N, K, SHORT, BLOCK_N, BLOCK_K, STAGES, WARPS, FORM, GROUP, SCALED, BIAS, WEIGHS,
            )  # fmt: skip


@triton.jit
def _add_up(
    parts_ptr,  # [rows, TOP_K, N]
    residual_ptr,  # [rows, N]: added to, in place
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Always in the same order."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < N
    residuals = residual_ptr + row * N + columns
    wait(DEPENDENT)
    release(DEPENDENT)
    total = tl.load(residuals, mask=is_column, other=0.0).to(tl.float32)
    for place in tl.static_range(TOP_K):
        parts = parts_ptr + (row * TOP_K + place) * N + columns
        total += tl.load(parts, mask=is_column, other=0.0).to(tl.float32)
    tl.store(residuals, total.to(residual_ptr.dtype.element_ty), mask=is_column)


def gate_tiles(
    x: Tensor,
    weight: ExpertWeights,
    bias: Tensor | None,
    routed: Routed,
    pairs: SortedPairs,
    *,
    activation: str,
    weighs: bool = False,
    sorts: bool = False,
) -> Tensor:
    """activation(gate) * up of each pair: x [rows, inputs], weight [experts, 2 * outputs, inputs], gates then ups, bias
    [experts, 2 * outputs] -> [pairs, outputs]; `weighs`: inputs are multiplied by the pair's weight; `sorts`: in the
    order of `pairs`.
    """
    num_pairs, outputs = routed.ids.numel(), weight.outputs // 2
    out = torch.empty(num_pairs, outputs, dtype=x.dtype, device=x.device)
    tile = tile_for(num_pairs, weight.count, weight.form)
    dependent = has_dependent_launch(x.device)
    _gate_tiles[(triton.cdiv(outputs, tile.outputs), most_tiles(num_pairs, weight.count, tile))](
        x,
        *operands(weight, x, bias),
        pairs.order,
        pairs.counts,
        pairs.firsts,
        routed.weights,
        out,
        N=outputs,
        K=x.shape[1],
        EXPERTS=weight.count,
        TOP_K=routed.ids.shape[1],
        BLOCK_M=tile.pairs,
        SHORT=tile.short,
        BLOCK_N=tile.outputs,
        BLOCK_K=_step(weight, tile),
        STAGES=_stages(weight, tile, x),
        WARPS=tile.warps,
        FORM=weight.form,
        GROUP=weight.group,
        SCALED=_is_scaled(weight, tile),
        ACTIVATION=ACTIVATIONS[activation],
        BIAS=bias is not None,
        WEIGHS=weighs,
        SORTED=sorts,
        DEPENDENT=dependent,
        **options(warps=tile.warps, dependent=dependent),
    )
    return out


def add_tiles(
    x: Tensor,
    weight: ExpertWeights,
    bias: Tensor | None,
    routed: Routed,
    pairs: SortedPairs,
    residual: Tensor,
    *,
    weighs: bool = True,
) -> None:
    """Add the products of each row's pairs to it, weighted if `weighs`, in place: x [pairs, inputs], weight [experts,
    outputs, inputs], bias [experts, outputs], residual [rows, outputs].
    """
    outputs, num_pairs = residual.shape[1], len(x)
    parts = torch.empty(num_pairs, outputs, dtype=x.dtype, device=x.device)
    tile = tile_for(num_pairs, weight.count, weight.form, is_added=True)
    dependent = has_dependent_launch(x.device)
    _multiply_tiles[(triton.cdiv(outputs, tile.outputs), most_tiles(num_pairs, weight.count, tile))](
        x,
        *operands(weight, x, bias),
        pairs.order,
        pairs.counts,
        pairs.firsts,
        routed.weights,
        parts,
        N=outputs,
        K=x.shape[1],
        EXPERTS=weight.count,
        BLOCK_M=tile.pairs,
        SHORT=tile.short,
        BLOCK_N=tile.outputs,
        BLOCK_K=_step(weight, tile),
        STAGES=_stages(weight, tile, x),
        WARPS=tile.warps,
        FORM=weight.form,
        GROUP=weight.group,
        SCALED=_is_scaled(weight, tile),
        BIAS=bias is not None,
        WEIGHS=weighs,
        DEPENDENT=dependent,
        **options(warps=tile.warps, dependent=dependent),
    )
    add_up(parts, residual)


def add_up(parts: Tensor, residual: Tensor) -> None:
    """Add the products of each row's pairs to it, in place: parts [pairs, outputs], residual [rows, outputs]."""
    rows, outputs = residual.shape
    dependent = has_dependent_launch(residual.device)
    _add_up[(rows, triton.cdiv(outputs, _COLUMNS))](
        parts,
        residual,
        N=outputs,
        TOP_K=len(parts) // rows,
        BLOCK=_COLUMNS,
        DEPENDENT=dependent,
        **options(warps=4, dependent=dependent),
    )


def _step(weight: ExpertWeights, tile: Tile) -> int:
    """Inputs of a step: floats of 32 bits take twice the room of those that tiles are for; of INT4 a block's."""
    if weight.form == INT4:
        return BLOCK
    inputs = tile.inputs * _TILED_BYTES // weight.numbers.element_size() if weight.form == FLOATS else tile.inputs
    return inputs if weight.group == 0 else power_of_two_divisor(weight.group, inputs)


def _stages(weight: ExpertWeights, tile: Tile, x: Tensor) -> int:
    """Steps under way: fewer where rows of 32 bits take twice the room and a step's inputs are a block's."""
    has_blocks, is_wide = weight.form in (FP4, INT4), x.element_size() > _TILED_BYTES
    return max(2, tile.stages // 2) if has_blocks and is_wide else tile.stages


def _is_scaled(weight: ExpertWeights, tile: Tile) -> bool:
    """Return whether scales are multiplied with numbers: of groups smaller than a block there is no other way."""
    return weight.form == INT4 and weight.group > 0 and (tile.scaled or weight.group < BLOCK)
