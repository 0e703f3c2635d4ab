"""Logits as penalties and biases change them, before a token is chosen. What a sequence has seen is counted anew from
its history in each step: it has far fewer tokens than the vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_svc.core.kernels.launch import options
from worker_svc.core.kernels.sampling.changes import Changes, keep_allowed
from worker_svc.core.kernels.sampling.token_masks import keep_masked
from worker_svc.core.kernels.sampling.tuning import PENALTIES
from worker_svc.core.kernels.state.tables import FREQUENCY, NUM_PROMPT, PRESENCE, REPETITION, SlotTables

_ALIGNMENT = 64  # columns, of a row, as logits have it
_NO_CHANGES = Changes()
_IN_PROMPT = tl.constexpr(1 << 30)  # a bit beside the count of a token in the output


@triton.jit
def _load_penalties(
    floats_ptr, slot, FLOATS: tl.constexpr, REPETITION: tl.constexpr, PRESENCE: tl.constexpr, FREQUENCY: tl.constexpr
):
    row = floats_ptr + slot * FLOATS
    return tl.load(row + REPETITION), tl.load(row + PRESENCE), tl.load(row + FREQUENCY)


@triton.jit
def _count_tokens(
    slots_ptr,  # i64[rows]
    positions_ptr,  # i64[rows]
    floats_ptr,  # f32[slots, FLOATS]
    integers_ptr,  # i64[slots, INTEGERS]
    histories_ptr,  # i32[slots, tokens]
    counts_ptr,  # i32[rows, columns], zeros
    counts_stride,
    histories_stride,
    FLOATS: tl.constexpr,
    INTEGERS: tl.constexpr,
    REPETITION: tl.constexpr,  # columns, as the next three
    PRESENCE: tl.constexpr,
    FREQUENCY: tl.constexpr,
    NUM_PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    repetition, presence, frequency = _load_penalties(floats_ptr, slot, FLOATS, REPETITION, PRESENCE, FREQUENCY)
    length = tl.load(positions_ptr + row)
    num_prompt = tl.load(integers_ptr + slot * INTEGERS + NUM_PROMPT)
    # Only what is punished is looked at: the prompt by nothing but repetition.
    first = tl.where(repetition != 1, 0, num_prompt)
    if (repetition == 1) & (presence == 0) & (frequency == 0):
        first = length
    for start in range(first + tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        places = start + tl.arange(0, BLOCK)
        is_known, is_prompt = places < length, places < num_prompt
        token_ids = tl.load(histories_ptr + slot * histories_stride + places, mask=is_known, other=0)
        pointers = counts_ptr + row * counts_stride + token_ids
        tl.atomic_or(pointers, _IN_PROMPT, mask=is_known & is_prompt)
        tl.atomic_add(pointers, 1, mask=is_known & (places >= num_prompt))


@triton.jit
def _penalise(
    logits_ptr,  # [rows, columns]
    slots_ptr,  # i64[rows]
    floats_ptr,  # f32[slots, FLOATS]
    counts_ptr,  # i32[rows, columns], read where a row has penalties
    out_ptr,  # f32[rows, columns]
    num_columns,
    row_stride,
    out_stride,  # and of counts
    FLOATS: tl.constexpr,
    REPETITION: tl.constexpr,
    PRESENCE: tl.constexpr,
    FREQUENCY: tl.constexpr,
    PART: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * PART + tl.arange(0, PART)
    is_column = columns < num_columns
    slot = tl.load(slots_ptr + row)
    repetition, presence, frequency = _load_penalties(floats_ptr, slot, FLOATS, REPETITION, PRESENCE, FREQUENCY)
    x = tl.load(logits_ptr + row * row_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    if (repetition != 1) | (presence != 0) | (frequency != 0):
        seen = tl.load(counts_ptr + row * out_stride + columns, mask=is_column, other=0)
        in_output = (seen & (_IN_PROMPT - 1)).to(tl.float32)
        x = tl.where(seen != 0, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
        x = x - tl.where(in_output > 0, presence, 0.0)
        x = x - in_output * frequency
    tl.store(out_ptr + row * out_stride + columns, x, mask=is_column)


@triton.jit(do_not_specialize=["num_entries"])
def _add_entries(
    rows_ptr,  # i64[entries]
    token_ids_ptr,  # i64[entries]
    values_ptr,  # f32[entries]
    out_ptr,  # f32[rows, columns]
    num_entries,
    out_stride,
    BLOCK: tl.constexpr,
):
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entries < num_entries
    rows = tl.load(rows_ptr + entries, mask=is_entry, other=0)
    token_ids = tl.load(token_ids_ptr + entries, mask=is_entry, other=0)
    values = tl.load(values_ptr + entries, mask=is_entry, other=0.0)
    tl.atomic_add(out_ptr + rows * out_stride + token_ids, values, mask=is_entry)


@triton.jit
def _forbid_words(
    rows_ptr,  # i64[words]
    token_ids_ptr,  # i64[words, WIDTH]: a word at the end of its row, negative before it
    slots_ptr,  # i64[rows]
    positions_ptr,  # i64[rows]
    integers_ptr,  # i64[slots, INTEGERS]
    histories_ptr,  # i32[slots, tokens]
    out_ptr,  # f32[rows, columns]
    histories_stride,
    out_stride,
    INTEGERS: tl.constexpr,
    NUM_PROMPT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    word = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + word)
    slot = tl.load(slots_ptr + row)
    num_prompt = tl.load(integers_ptr + slot * INTEGERS + NUM_PROMPT)
    columns = tl.arange(0, WIDTH)
    token_ids = tl.load(token_ids_ptr + word * WIDTH + columns)
    # Where the word would stand if its last token came now.
    places = tl.load(positions_ptr + row) - (WIDTH - 1) + columns
    is_before = (token_ids >= 0) & (columns < WIDTH - 1)
    is_output = is_before & (places >= num_prompt)
    past = tl.load(histories_ptr + slot * histories_stride + places, mask=is_output, other=-1).to(tl.int64)
    num_others = tl.sum((is_before & (past != token_ids)).to(tl.int32), 0)
    last = tl.sum(tl.where(columns == WIDTH - 1, token_ids, 0), 0)
    tl.store(out_ptr + row * out_stride + last, float("-inf"), mask=num_others == 0)


def changed_logits(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    state: SlotTables,
    *,
    has_penalties: bool = False,
    changes: Changes | None = None,
) -> Tensor:
    """Logits f32[rows, vocab_size] of which the tokens at `positions` i64[rows] of `slots` i64[rows] are chosen: logits
    [rows, vocab_size], less what the tokens before them are punished by if some `has_penalties`, with the `changes`.
    Both may be the same tensor if nothing is changed.
    """
    if not has_penalties and changes is None:
        return logits
    rows, columns = logits.shape
    stride = -(-columns // _ALIGNMENT) * _ALIGNMENT
    out = torch.empty(rows, stride, device=logits.device)[:, :columns]
    counts = torch.zeros(rows, stride, dtype=torch.int32, device=logits.device) if has_penalties else None
    table = {"FLOATS": state.floats.shape[1], "REPETITION": REPETITION, "PRESENCE": PRESENCE, "FREQUENCY": FREQUENCY}
    if counts is not None:
        _count_tokens[(rows, PENALTIES.programs)](
            slots,
            positions,
            state.floats,
            state.integers,
            state.tokens,
            counts,
            stride,
            state.tokens.stride(0),
            INTEGERS=state.integers.shape[1],
            NUM_PROMPT=NUM_PROMPT,
            BLOCK=PENALTIES.tokens,
            **table,
            **options(warps=4),
        )
    _penalise[(rows, triton.cdiv(columns, PENALTIES.columns))](
        logits,
        slots,
        state.floats,
        counts if counts is not None else state.tokens,
        out,
        columns,
        logits.stride(0),
        stride,
        PART=PENALTIES.columns,
        **table,
        **options(warps=8),
    )
    changes = changes or _NO_CHANGES
    if (entries := changes.entries) is not None:
        num_entries = len(entries.values)
        _add_entries[(triton.cdiv(num_entries, PENALTIES.entries),)](
            entries.rows,
            entries.token_ids,
            entries.values,
            out,
            num_entries,
            stride,
            BLOCK=PENALTIES.entries,
            **options(warps=4),
        )
    if changes.allowed is not None:
        keep_allowed(out, changes.allowed)
    if (words := changes.words) is not None:
        _forbid_words[(len(words.rows),)](
            words.rows,
            words.token_ids,
            slots,
            positions,
            state.integers,
            state.tokens,
            out,
            state.tokens.stride(0),
            stride,
            INTEGERS=state.integers.shape[1],
            NUM_PROMPT=NUM_PROMPT,
            WIDTH=words.token_ids.shape[1],
            **options(warps=1),
        )
    if changes.masks is not None:
        keep_masked(out, changes.masks)
    return out
