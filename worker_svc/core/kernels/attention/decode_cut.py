"""The cut of the contexts of decode attention into the work of programs."""

from dataclasses import dataclass

MIN_QUERY_ROWS = 16  # of a matrix product's operand, as tokens of a tile
_FEW_SEQUENCES = 32
_LARGE_GROUP = 4  # queries of a key
_ROW_BYTES, _TOKEN_BYTES = 256, 2048  # of one key, and of those of all heads
# Of shared memory: two tiles of keys and of values, and room for conversions.
SHARE_BYTES = 5 * MIN_QUERY_ROWS * _TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class ContextCut:
    """The cut of contexts into the work of programs."""

    splits: int  # of a context, at most
    split_tokens: int  # a split reads at least so many
    tokens: int  # of a tile
    stages: int  # of the loop over tiles
    warps: int  # of a program
    registers: int | None  # of a thread, at most, so that more programs run at once
    ahead: int  # tiles that do not wait for the kernel ahead: 0 none, 1 the first, in registers, 2 one for each stage


@dataclass(frozen=True, slots=True)
class Shares:
    """The cut of all contexts together into the work of programs that have all heads."""

    programs: int
    tokens: int  # of a tile
    stages: int  # of the loop over tiles
    warps: int
    cost: int  # of a context, beside its tiles: a program begins and ends it while its next tiles are on their way


def find_shares(sequences: int, num_kv_heads: int, row_bytes: int, multiprocessors: int) -> Shares | None:
    """Of more than a few contexts, for a power of two of heads with keys of common sizes; None: splits are better.

    `multiprocessors`: those that have `SHARE_BYTES`.
    """
    token_bytes = num_kv_heads * row_bytes
    fits = row_bytes <= _ROW_BYTES and token_bytes <= _TOKEN_BYTES and num_kv_heads & (num_kv_heads - 1) == 0
    if sequences <= _FEW_SEQUENCES or not fits or not multiprocessors:
        return None
    return Shares(multiprocessors * (_TOKEN_BYTES // token_bytes), MIN_QUERY_ROWS, 3, num_kv_heads, 4)


def cut(sequences: int, num_kv_heads: int, group: int, row_bytes: int) -> ContextCut:
    """As measured best in the steps of Qwen3-0.6B on an H200, for keys of `row_bytes` (of one head): few programs share
    a context and begin early; more have several tiles on their way; many are small, so that a multiprocessor holds
    several and one reads while another computes. One sequence of larger groups of queries, as Qwen3-8B's.
    """
    programs = sequences * num_kv_heads
    if sequences == 1 and group >= _LARGE_GROUP:
        return ContextCut(max(1, 264 // programs), 16, _tokens(16, row_bytes), 3, 1, None, ahead=1)
    if programs <= 64:
        return ContextCut(max(1, 264 // programs), 64, _tokens(64, row_bytes), 3, 2, None, ahead=1)
    if programs <= 256:
        return ContextCut(max(1, 264 // programs), 128, _tokens(128, row_bytes), 3, 4, None, ahead=int(programs > 128))
    if programs < 1536:
        return ContextCut(2 if programs <= 512 else 1, 512, _tokens(32, row_bytes), 3, 2, None, ahead=2)
    return ContextCut(1, 512, _tokens(32, row_bytes), 3, 2, 128, ahead=0)


def _tokens(measured: int, row_bytes: int) -> int:
    """Of a tile: as many as fit where `measured` rows of 256 bytes do."""
    return max(MIN_QUERY_ROWS, min(128, measured * 256 // row_bytes))
