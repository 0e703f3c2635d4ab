"""Attention of sequences that advance by one token, from q, k and v to the attended heads."""

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from worker_svc.core.kernels.attention.decode_plan import PLAN_COLUMNS, plan_shares
from worker_svc.core.kernels.attention.decode_shares import attend_shares, finish_heads
from worker_svc.core.kernels.attention.decode_splits import attend_splits
from worker_svc.core.kernels.attention.decode_stream import stream_shares, stream_warps
from worker_svc.core.kernels.attention.head_dims import tile_dims
from worker_svc.core.kernels.attention.tuning import (
    MIN_QUERY_ROWS,
    SHARE_BYTES,
    ContextCut,
    Shares,
    find_cut,
    find_shares,
    query_rows,
)
from worker_svc.core.kernels.launch import has_dependent_launch, multiprocessors, options
from worker_svc.core.kernels.linear.unscaled import Unscaled

_LOG2E = 1.4426950408889634
# Parts of a context that are added up at a time, at most (more take longer to compile), their queries, and registers of
# a thread for them.
_PARTS_AT_ONCE, _QUERIES_AT_ONCE, _PARTS_REGISTERS = 8, 32, 64
_FINISH_REGISTERS = 80  # so that two programs leave room for one of `attend_shares` beside them


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The sequences of a step that advance by one token; all i64[sequences] on the device."""

    rows: Tensor  # where each one's token stands in the flat columns
    slots: Tensor
    contexts: Tensor  # tokens with KV once the step is done
    as_many: int = 0  # as which they are attended to, by the same kernels; 0: as they are

    @property
    def kernels_for(self) -> int:
        """The number of sequences that kernels are chosen for: no fewer than there are."""
        return max(self.as_many, len(self))

    def __len__(self) -> int:
        return len(self.rows)


class DecodeAttention:
    """Split-KV paged decoding (Dao et al., Flash-Decoding, 2023) for up to `max_sequences` at once, on one stream.

    Keys and values are [num_blocks, block_size, num_kv_heads, head_dim] with any strides but the last.
    """

    def __init__(
        self,
        max_sequences: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: Tensor,
        *,
        scale: float,
        block_size: int,
        item_bytes: int = 2,
        window: int | None = None,
        softcap: float | None = None,
        has_sinks: bool = False,
        chunk: int | None = None,
        temperature: tuple[int, float, int] = (0, 0.0, 0),
        has_scales: bool = False,
    ) -> None:
        """`scale`: of scores; `window`: tokens that are seen, the new one included; `softcap`: scores are softcap *
        tanh(score / softcap); `has_sinks`: `attend` is given some; `chunk`: contexts are cut into so many tokens, of
        which the new one sees its own; `temperature`: the (floor_scale, attn_scale, first) of `tempered`, of 0: none;
        `has_scales`: keys and values are kept as 8-bit floats.
        """
        device = rotary.device
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self.query_scale = scale * _LOG2E  # softmax is to the base of 2
        self._window, self._chunk = window or 0, chunk or 0
        self._temperature = temperature
        self._softcap = (softcap or 0.0) * _LOG2E
        self._has_sinks, self._has_scales = has_sinks, has_scales
        self._rotary = rotary
        self._dependent = has_dependent_launch(device)
        self._row_bytes = tile_dims(head_dim) * item_bytes  # of a key in a tile
        self._multiprocessors = multiprocessors(device, SHARE_BYTES)
        self._block_size = block_size
        self._stream_warps = stream_warps(device, block_size, num_heads, num_kv_heads, head_dim, item_bytes)
        self._max_sequences = triton.next_power_of_2(max_sequences)
        counts = range(1, max_sequences + 1)
        programs = max((shares.programs for shares in map(self._find_shares, counts) if shares), default=0)
        cuts = {count: self._cut(count) for count in counts}
        # Groups may have room for more queries than there are.
        most = max(cut.splits * count * cut.groups * self._in_group(cut) for count, cut in cuts.items()) * num_kv_heads
        most = max(most, 2 * programs * num_heads)
        self._plan = torch.empty(programs, PLAN_COLUMNS, dtype=torch.int32, device=device)
        self._partial = torch.empty(most * head_dim, device=device)
        self._weight = torch.empty(most, device=device)
        groups = max(cut.groups for cut in cuts.values())
        self._done = torch.zeros(max_sequences * num_kv_heads * groups, dtype=torch.int32, device=device)

    def _cut(self, sequences: int) -> ContextCut:
        chosen = find_cut(sequences, self._num_kv_heads, self._num_heads // self._num_kv_heads, self._row_bytes)
        # No context is longer than the table of positions: further splits would find nothing.
        return replace(chosen, splits=min(chosen.splits, triton.cdiv(len(self._rotary), chosen.split_tokens)))

    def _in_group(self, cut: ContextCut) -> int:
        """The queries of a key that a program has."""
        return -(-self._num_heads // (self._num_kv_heads * cut.groups))

    def _find_shares(self, sequences: int) -> Shares | None:
        if self._window or self._chunk or self._temperature[0] or self._softcap:
            return None
        if self._has_sinks or (not self._stream_warps and self._num_heads > MIN_QUERY_ROWS * self._num_kv_heads):
            return None  # more rows of queries were not measured
        # Of 8 bits a program has more tiles on their way: more programs instead took 4 to 10 % longer on an H200.
        row_bytes = max(self._row_bytes, 2 * tile_dims(self._head_dim))
        return find_shares(sequences, self._num_kv_heads, row_bytes, self._multiprocessors, self._stream_warps)

    def plan(self, rows: DecodeRows, block_tables: Tensor) -> None:
        """Cut the contexts of a step; called before its first `attend`, with the same tables."""
        if (shares := self._find_shares(rows.kernels_for)) is not None:
            plan_shares[(shares.programs,)](
                rows.rows,
                rows.slots,
                rows.contexts,
                block_tables,
                self._plan,
                len(rows),
                block_tables.stride(0),
                BLOCK_SIZE=self._block_size,
                BLOCK_T=shares.tokens,
                COST=shares.cost,
                ADDED=shares.added,
                SEQUENCES=self._max_sequences,
                **options(),
            )

    def takes_finished(self, sequences: int) -> bool:
        """Return whether `attend` can have the heads of so many finished ahead, by whoever does that for others."""
        return self._find_shares(sequences) is not None

    def attend(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        rows: DecodeRows,
        block_tables: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        unscaled: Unscaled | None = None,
        sinks: Tensor | None = None,
        *,
        scales: tuple[float, float] = (1.0, 1.0),
        is_finished: bool = False,
    ) -> None:
        """Write the new tokens' keys and values into the cache, and the attended heads into `out`.

        qkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim], which may be overwritten, norms each [head_dim],
        block_tables i32[slots, blocks], out [tokens, num_heads * head_dim]; rows of qkv and out that `rows` does not
        name are left alone.
        `unscaled`: of the rows of qkv; `sinks` [num_heads]: scores that take part in each head's softmax and have no
        value; `scales`: of keys and values that are kept as 8-bit floats; `is_finished`: keys and values are in the
        cache, queries normalised, rotated and multiplied by `query_scale` and the scale of keys; only where
        `takes_finished` says so.
        """
        if (shares := self._find_shares(rows.kernels_for)) is not None:
            if not is_finished:
                self._finish(qkv, norms, eps, rows, block_tables, keys, values, unscaled, scales)
            self._attend_shares(shares, qkv, rows, block_tables, keys, values, out, scales[1])
        else:
            cut = self._cut(rows.kernels_for)
            self._attend_splits(cut, qkv, norms, eps, rows, block_tables, keys, values, out, unscaled, sinks, scales)

    def _attend_splits(
        self,
        chosen: ContextCut,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        rows: DecodeRows,
        block_tables: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        unscaled: Unscaled | None,
        sinks: Tensor | None,
        scales: tuple[float, float],
    ) -> None:
        head_dim = self._head_dim
        queries = self._in_group(chosen)
        query_norm, key_norm = norms if norms is not None else (qkv, qkv)
        attend_splits[(self._num_kv_heads * chosen.groups, chosen.splits, len(rows))](
            qkv,
            query_norm,
            key_norm,
            unscaled.hidden if unscaled is not None else qkv,
            self._rotary,
            rows.rows,
            rows.slots,
            rows.contexts,
            block_tables,
            keys,
            values,
            out,
            self._partial,
            self._weight,
            sinks if sinks is not None else self._weight,
            self._done,
            eps,
            unscaled.eps if unscaled is not None else 0.0,
            self.query_scale * scales[0],
            *scales,
            block_tables.stride(0),
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            H=self._num_heads,
            HK=self._num_kv_heads,
            D=head_dim,
            G=self._num_heads // self._num_kv_heads,
            GROUPS=chosen.groups,
            GG=queries,
            GR=triton.next_power_of_2(queries),
            GP=query_rows(queries),
            BLOCK_SIZE=keys.shape[1],
            BLOCK_T=chosen.tokens,
            SPLIT_T=chosen.split_tokens,
            PARTS=_parts_at_once(chosen, triton.next_power_of_2(queries), tile_dims(head_dim)),
            NORM=norms is not None,
            HIDDEN=unscaled.hidden.shape[1] if unscaled is not None else 0,
            STAGES=chosen.stages,
            SPLIT=chosen.splits > 1,
            AHEAD=chosen.ahead,
            WINDOW=self._window,
            CHUNK=self._chunk,
            FLOOR_SCALE=self._temperature[0],
            ATTN_SCALE=self._temperature[1],
            FIRST=self._temperature[2],
            SOFTCAP=self._softcap,
            SINKS=sinks is not None,
            DEPENDENT=self._dependent,
            **options(warps=chosen.warps, dependent=self._dependent, registers=chosen.registers),
        )

    def _finish(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        rows: DecodeRows,
        block_tables: Tensor,
        keys: Tensor,
        values: Tensor,
        unscaled: Unscaled | None,
        scales: tuple[float, float],
    ) -> None:
        query_norm, key_norm = norms if norms is not None else (qkv, qkv)
        finish_heads[(len(rows),)](
            qkv,
            query_norm,
            key_norm,
            unscaled.hidden if unscaled is not None else qkv,
            self._rotary,
            rows.rows,
            rows.slots,
            rows.contexts,
            block_tables,
            keys,
            values,
            eps,
            unscaled.eps if unscaled is not None else 0.0,
            self.query_scale * scales[0],
            *scales,
            block_tables.stride(0),
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            H=self._num_heads,
            HK=self._num_kv_heads,
            D=self._head_dim,
            HEADS=triton.next_power_of_2(self._num_heads),
            BLOCK_SIZE=keys.shape[1],
            NORM=norms is not None,
            HIDDEN=unscaled.hidden.shape[1] if unscaled is not None else 0,
            DEPENDENT=self._dependent,
            **options(dependent=self._dependent, registers=_FINISH_REGISTERS),
        )

    def _attend_shares(
        self,
        shares: Shares,
        qkv: Tensor,
        rows: DecodeRows,
        block_tables: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        value_scale: float,
    ) -> None:
        if self._stream_warps:
            stream_shares(
                shares,
                qkv,
                (rows.rows, rows.slots, rows.contexts),
                self._plan,
                block_tables,
                keys,
                values,
                out,
                (self._partial, self._weight, self._done),
                value_scale,
            )
            return
        heads, kv_heads, head_dim = self._num_heads, self._num_kv_heads, self._head_dim
        attend_shares[(shares.programs,)](
            qkv,
            rows.rows,
            rows.slots,
            rows.contexts,
            self._plan,
            block_tables,
            keys,
            values,
            out,
            self._partial,
            self._weight,
            self._done,
            value_scale,
            len(rows),
            block_tables.stride(0),
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            H=heads,
            HK=kv_heads,
            D=head_dim,
            G=heads // kv_heads,
            GP=query_rows(heads // kv_heads),
            BLOCK_SIZE=keys.shape[1],
            BLOCK_T=shares.tokens,
            HEADS=triton.next_power_of_2(heads),
            STAGES=shares.stages,
            DEPENDENT=self._dependent,
            **options(warps=shares.warps, dependent=self._dependent),
        )


def _parts_at_once(cut: ContextCut, queries: int, dims: int) -> int:
    """The parts of a context that a program adds up at a time, each of so many queries of so many dimensions, powers of
    two as it is itself: at least two, whatever registers they need.
    """
    held = 32 * cut.warps * _PARTS_REGISTERS // (queries * dims)
    return max(2, min(_PARTS_AT_ONCE, _QUERIES_AT_ONCE // queries, int(triton.next_power_of_2(cut.splits)), held))
