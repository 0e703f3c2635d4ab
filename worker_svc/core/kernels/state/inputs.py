"""The state of slots, read into the inputs of a step."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import options
from worker_svc.core.kernels.state.tables import MIN_P, SEED, TOP_K, TOP_P, SlotTables

_COLUMNS = 1024  # of a table that a program looks up


@triton.jit
def _decode_inputs(
    slots_ptr,  # i64[rows]
    num_computed_ptr,  # i64[slots]
    tokens_ptr,  # i32[slots, tokens]
    floats_ptr,  # f32[slots, FLOATS], the first is the temperature
    integers_ptr,  # i64[slots, INTEGERS], column SEED is the seed
    table_ptr,  # [vocabulary, size]
    contexts_ptr,  # i64[rows]
    temperatures_ptr,  # f32[rows]
    seeds_ptr,  # i64[rows]
    token_ids_ptr,  # i64[rows]
    hidden_ptr,  # [rows, size]: zeros where a row pads a batch: without biases they stay so, and take less power
    tokens_stride,
    size,
    dummy_slot,
    FLOATS: tl.constexpr,
    INTEGERS: tl.constexpr,
    SEED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    position = tl.load(num_computed_ptr + slot)
    token_id = tl.load(tokens_ptr + slot * tokens_stride + position).to(tl.int64)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    is_known = (columns < size) & (slot != dummy_slot)
    embedded = tl.load(table_ptr + token_id * size + columns, mask=is_known, other=0.0)
    tl.store(hidden_ptr + row * size + columns, embedded, mask=columns < size)
    if part == 0:
        tl.store(contexts_ptr + row, position + 1)
        tl.store(temperatures_ptr + row, tl.load(floats_ptr + slot * FLOATS))
        tl.store(seeds_ptr + row, tl.load(integers_ptr + slot * INTEGERS + SEED))
        tl.store(token_ids_ptr + row, token_id)


@triton.jit
def _chunk_inputs(
    slots_ptr,  # i64[seqs]
    contexts_ptr,  # i64[seqs]
    ends_ptr,  # i64[seqs]
    tokens_ptr,  # i32[slots, tokens]
    blocks_ptr,  # i32[slots, blocks] of each kind of layers
    table_ptr,  # [vocabulary, size]
    token_ids_ptr,  # i64[rows]
    positions_ptr,  # i64[rows]
    slot_mappings_ptr,  # i64[KINDS, rows]
    hidden_ptr,  # [rows, size], as above
    tokens_stride,
    blocks_stride,
    kinds_stride,
    mappings_stride,
    block_size,
    size,
    dummy_slot,
    num_seqs,
    SEQS: tl.constexpr,  # power of two from num_seqs
    KINDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    seqs = tl.arange(0, SEQS)
    ends = tl.load(ends_ptr + seqs, mask=seqs < num_seqs, other=row + 1)
    owner = tl.sum((ends <= row).to(tl.int32), 0)
    slot = tl.load(slots_ptr + owner)
    position = tl.load(contexts_ptr + owner) - tl.load(ends_ptr + owner) + row
    token_id = tl.load(tokens_ptr + slot * tokens_stride + position).to(tl.int64)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    is_known = (columns < size) & (slot != dummy_slot)
    embedded = tl.load(table_ptr + token_id * size + columns, mask=is_known, other=0.0)
    tl.store(hidden_ptr + row * size + columns, embedded, mask=columns < size)
    if part == 0:
        tl.store(token_ids_ptr + row, token_id)
        tl.store(positions_ptr + row, position)
        entry = blocks_ptr + slot * blocks_stride + position // block_size
        for kind in tl.static_range(KINDS):
            block = tl.load(entry + kind * kinds_stride).to(tl.int64)
            mapping = slot_mappings_ptr + kind * mappings_stride
            tl.store(mapping + row, block * block_size + position % block_size)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The inputs of one decode step; all [rows]."""

    token_ids: Tensor  # i64
    contexts: Tensor  # i64, tokens with KV once the step is done
    temperatures: Tensor  # f32
    seeds: Tensor  # i64
    hidden: Tensor | None  # [rows, hidden_size]: the tokens' rows of the table, zeros for the slot that pads batches


def decode_inputs(slots: Tensor, state: SlotTables, table: Tensor | None = None) -> DecodeInputs:
    """The inputs of the step that computes the next token of each of `slots` i64[rows]; they are looked up in `table`
    [vocab_size, hidden_size] if one is given.
    """
    rows, device = len(slots), slots.device
    size = table.shape[1] if table is not None else 0
    inputs = DecodeInputs(
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, size, dtype=table.dtype, device=device) if table is not None else None,
    )
    _decode_inputs[(rows, max(1, triton.cdiv(size, _COLUMNS)))](
        slots,
        state.num_computed,
        state.tokens,
        state.floats,
        state.integers,
        table if table is not None else state.tokens,
        inputs.contexts,
        inputs.temperatures,
        inputs.seeds,
        inputs.token_ids,
        inputs.hidden if inputs.hidden is not None else state.tokens,
        state.tokens.stride(0),
        size,
        state.dummy_slot,
        FLOATS=state.floats.shape[1],
        INTEGERS=state.integers.shape[1],
        SEED=SEED,
        BLOCK=_COLUMNS,
        **options(warps=4),
    )
    return inputs


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """The inputs of a step of chunks; all [rows]."""

    token_ids: Tensor  # i64
    positions: Tensor  # i64, of each token in its sequence
    slot_mappings: tuple[Tensor, ...]  # i64 by kind of layers: block * block_size + offset, where its KV goes
    hidden: Tensor | None  # as above


def chunk_inputs(
    num_rows: int,
    slots: Tensor,
    contexts: Tensor,
    ends: Tensor,
    state: SlotTables,
    block_size: int,
    table: Tensor | None = None,
) -> ChunkInputs:
    """The inputs of the step in which sequence i, in `slots` i64[seqs], computes the rows between the end of the one
    before and its own, of `ends` i64[seqs]: the last of its first `contexts` i64[seqs] tokens. They are looked up in
    `table` [vocab_size, hidden_size] if one is given. The last sequence ends with the last row.
    """
    device = slots.device
    size = table.shape[1] if table is not None else 0
    tables = state.block_tables
    # Each begins at a multiple of 16 bytes: kernels are compiled again for pointers that do not.
    slot_mappings = torch.empty(len(tables), num_rows + num_rows % 2, dtype=torch.int64, device=device)
    inputs = ChunkInputs(
        torch.empty(num_rows, dtype=torch.int64, device=device),
        torch.empty(num_rows, dtype=torch.int64, device=device),
        slot_mappings[:, :num_rows].unbind(0),
        torch.empty(num_rows, size, dtype=table.dtype, device=device) if table is not None else None,
    )
    _chunk_inputs[(num_rows, max(1, triton.cdiv(size, _COLUMNS)))](
        slots,
        contexts,
        ends,
        state.tokens,
        tables[0],
        table if table is not None else state.tokens,
        inputs.token_ids,
        inputs.positions,
        slot_mappings,
        inputs.hidden if inputs.hidden is not None else state.tokens,
        state.tokens.stride(0),
        tables[0].stride(0),
        tables[1].storage_offset() - tables[0].storage_offset() if len(tables) > 1 else 0,
        slot_mappings.stride(0),
        block_size,
        size,
        state.dummy_slot,
        len(slots),
        SEQS=triton.next_power_of_2(len(slots)),
        KINDS=len(tables),
        BLOCK=_COLUMNS,
        **options(warps=4),
    )
    return inputs


@triton.jit
def _draw_inputs(
    slots_ptr,  # i64[rows]
    floats_ptr,  # f32[slots, FLOATS], the first is the temperature
    integers_ptr,  # i64[slots, INTEGERS]
    temperatures_ptr,  # f32[rows], as the next two
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,  # i64[rows], as the next
    top_k_ptr,
    FLOATS: tl.constexpr,
    INTEGERS: tl.constexpr,
    TOP_P: tl.constexpr,  # columns, as the next three
    MIN_P: tl.constexpr,
    SEED: tl.constexpr,
    TOP_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    tl.store(temperatures_ptr + row, tl.load(floats_ptr + slot * FLOATS))
    tl.store(top_p_ptr + row, tl.load(floats_ptr + slot * FLOATS + TOP_P))
    tl.store(min_p_ptr + row, tl.load(floats_ptr + slot * FLOATS + MIN_P))
    tl.store(seeds_ptr + row, tl.load(integers_ptr + slot * INTEGERS + SEED))
    tl.store(top_k_ptr + row, tl.load(integers_ptr + slot * INTEGERS + TOP_K))


@dataclass(frozen=True, slots=True)
class DrawInputs:
    """The parameters by which a token is drawn; all [rows]."""

    temperatures: Tensor  # f32
    top_p: Tensor  # f32
    min_p: Tensor  # f32
    seeds: Tensor  # i64
    top_k: Tensor  # i64


def draw_inputs(slots: Tensor, state: SlotTables) -> DrawInputs:
    """The parameters that `slots` i64[rows] ask for."""
    # Memory of their own each, since kernels are compiled again for pointers that are not aligned.
    inputs = DrawInputs(
        *(torch.empty(len(slots), device=slots.device) for _ in range(3)),
        *(torch.empty(len(slots), dtype=torch.int64, device=slots.device) for _ in range(2)),
    )
    _draw_inputs[(len(slots),)](
        slots,
        state.floats,
        state.integers,
        inputs.temperatures,
        inputs.top_p,
        inputs.min_p,
        inputs.seeds,
        inputs.top_k,
        FLOATS=state.floats.shape[1],
        INTEGERS=state.integers.shape[1],
        TOP_P=TOP_P,
        MIN_P=MIN_P,
        SEED=SEED,
        TOP_K=TOP_K,
        **options(warps=1),
    )
    return inputs
