"""The cuts of attention into the work of programs, as measured best in steps of Qwen3-0.6B and 8B on an H200."""

from dataclasses import dataclass

MIN_QUERY_ROWS = 16  # of a matrix product's operand, as tokens of a tile
_FEW_SEQUENCES = 32
_ROW_BYTES, _TOKEN_BYTES = 256, 2048  # of one key, and of those of all heads
# Of shared memory: two tiles of keys and of values, and room for conversions.
SHARE_BYTES = 5 * MIN_QUERY_ROWS * _TOKEN_BYTES
_STREAM_WARPS = 8  # of a multiprocessor, that attend to what is streamed


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
    groups: int = 1  # of a key's queries: each has programs of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class _CutLine:
    """A cut, and what it is for; None: any."""

    most_sequences: int | None = None
    fewest_queries: int = 1  # of a key
    fewest_row_bytes: int = 0  # see `find_cut`, as the next
    most_row_bytes: int | None = None
    most_programs: int | None = None  # if each had one context and one group of a key's queries
    most_queries: int | None = None  # of a group; None: all of a key are one
    splits: int = 1
    programs: int = 0  # that splits come to, where these are more
    split_tokens: int
    tokens: int  # for keys of `_ROW_BYTES`
    warps: int
    registers: int | None = None
    ahead: int

    def groups(self, queries: int) -> int:
        """Of so many queries of a key."""
        return 1 if self.most_queries is None else -(-queries // self.most_queries)


# Few programs share a context and begin early; more have several tiles on their way; many are small, so that a
# multiprocessor holds several and one reads while another computes.
_CUTS = (
    # Groups of at most 16 queries, which is what matrix units take, on an H200: 34 heads with 2 of keys took 11.6, 12.3
    # and 12.9 us for 1, 8 and 32 contexts of 192 tokens in one group, and take 9.2, 9.6 and 12.0; one of 2,000 took 28,
    # and takes 21. 64 heads with 1 of keys take 9.1 in four groups, 11.5 in two.
    _CutLine(
        most_programs=32,
        fewest_queries=17,
        most_queries=16,
        programs=264,
        split_tokens=512,
        tokens=64,
        warps=8,
        ahead=2,
    ),
    # 64 of 192 and 1,000 tokens took 15.5 and 43.7, and take 12.4 and 34.2; 128 took 17.3 and 48.5, and would take 23.5
    # and 65.9.
    _CutLine(
        most_programs=256,
        fewest_queries=17,
        most_queries=16,
        programs=264,
        split_tokens=256,
        tokens=64,
        warps=4,
        ahead=2,
    ),
    # On an H100 128 and 256 contexts of 192 tokens took 26.5 and 31.7 us by the lines after these with twice the warps,
    # and take 17.1 and 27.0. 33 of 6,000 took 180 whole, in tiles of 32, and 89 by the first of these.
    _CutLine(most_programs=256, fewest_queries=17, programs=264, split_tokens=4096, tokens=64, warps=4, ahead=2),
    _CutLine(fewest_queries=33, split_tokens=512, tokens=64, warps=4, ahead=0),  # not measured
    _CutLine(fewest_queries=17, split_tokens=512, tokens=64, warps=2, ahead=0),
    # Gemma 3 4B and gpt-oss-20b, on an H100: contexts of 256 tokens took 10.2 and 5.2 us by lines that went, and take
    # 6.2 and 4.1.
    _CutLine(most_sequences=1, fewest_row_bytes=512, programs=264, split_tokens=32, tokens=64, warps=4, ahead=1),
    _CutLine(most_sequences=1, most_row_bytes=128, programs=264, split_tokens=64, tokens=32, warps=2, ahead=1),
    # In a graph of layers on an H200, beside 264 programs of one warp that read a small tile at a time and whose parts
    # were added up in the same way: a layer of Qwen3-30B-A3B takes 5.8 us less after 200 tokens, 11.7 after 1,000 and
    # 21.6 after 16,000. Eight of Qwen3-8B, whose weights were 8-bit floats, and the head take 755 us instead of 794
    # after 256 tokens and 796 instead of 846 after 2,000, with other tiles of its products.
    _CutLine(most_sequences=1, fewest_queries=8, programs=132, split_tokens=128, tokens=64, warps=8, ahead=2),
    _CutLine(most_sequences=1, fewest_queries=4, programs=132, split_tokens=64, tokens=64, warps=8, ahead=2),
    # The same on an H200, after 256 and 2,000 tokens: by the lines after these 8 of Gemma took 11.7 and 33.0 us,
    # and take 8.2 and 21.7; 8 of gpt-oss 5.7 and 16.3, and 5.4 and 15.4; 8 of 30B-A3B 9.2 and 22.2, and 7.4 and 18.3.
    _CutLine(most_programs=64, fewest_row_bytes=512, programs=264, split_tokens=32, tokens=64, warps=4, ahead=2),
    _CutLine(most_programs=64, fewest_queries=7, programs=264, split_tokens=128, tokens=128, warps=4, ahead=1),
    _CutLine(most_programs=64, programs=264, split_tokens=64, tokens=64, warps=2, ahead=1),
    # 16 of Qwen3-8B took 14.1 and 48.9 us, and take 10.3 and 40.0; 32 of 30B-A3B 12.7 and 48.5, and 10.3 and 41.0.
    _CutLine(
        most_programs=128,
        fewest_queries=4,
        fewest_row_bytes=256,
        most_row_bytes=256,
        programs=264,
        split_tokens=512,
        tokens=64,
        warps=4,
        ahead=2,
    ),
    _CutLine(most_programs=128, programs=264, split_tokens=128, tokens=128, warps=4, ahead=0),
    _CutLine(most_programs=256, programs=264, split_tokens=128, tokens=128, warps=4, ahead=1),
    _CutLine(most_programs=512, splits=2, split_tokens=512, tokens=32, warps=2, ahead=2),
    _CutLine(most_programs=1535, split_tokens=512, tokens=32, warps=2, ahead=2),
    _CutLine(split_tokens=512, tokens=32, warps=2, registers=128, ahead=0),
)
_STAGES = 3


def query_rows(group: int) -> int:
    """The rows of a tile that has `group` queries of a key: a power of two."""
    return max(MIN_QUERY_ROWS, 1 << (group - 1).bit_length())


def find_cut(sequences: int, num_kv_heads: int, group: int, row_bytes: int) -> ContextCut:
    """Of contexts with `group` queries of a key, for keys of `row_bytes` (of one head)."""
    heads = sequences * num_kv_heads
    line = next(
        line
        for line in _CUTS
        if _is_upto(sequences, line.most_sequences)
        and group >= line.fewest_queries
        and _is_upto(heads * line.groups(group), line.most_programs)
        and line.fewest_row_bytes <= row_bytes
        and _is_upto(row_bytes, line.most_row_bytes)
    )
    groups = line.groups(group)
    # As many tokens of a tile as fit where those do that were measured.
    tokens = max(MIN_QUERY_ROWS, min(128, line.tokens * _ROW_BYTES // row_bytes))
    splits = max(line.splits, line.programs // (heads * groups))
    return ContextCut(splits, line.split_tokens, tokens, _STAGES, line.warps, line.registers, line.ahead, groups)


@dataclass(frozen=True, slots=True)
class Shares:
    """The cut of all contexts together into the work of programs that have all heads."""

    programs: int
    tokens: int  # of a tile
    stages: int  # of the loop over tiles
    warps: int
    cost: int  # of a context, beside its tiles: a program begins and ends it while its next tiles are on their way
    added: int = 2  # what it takes to add up the parts of contexts, in tiles


def find_shares(
    sequences: int, num_kv_heads: int, row_bytes: int, multiprocessors: int, stream_warps: int = 0
) -> Shares | None:
    """Of more than a few contexts, for a power of two of heads with keys of common sizes; None: splits are better.

    `multiprocessors`: those that have `SHARE_BYTES`; `stream_warps`: of a program, where shares are streamed.
    """
    token_bytes = num_kv_heads * row_bytes
    fits = row_bytes <= _ROW_BYTES and token_bytes <= _TOKEN_BYTES and num_kv_heads & (num_kv_heads - 1) == 0
    if sequences <= _FEW_SEQUENCES or not fits or not multiprocessors:
        return None
    if not stream_warps:
        programs = multiprocessors * (_TOKEN_BYTES // token_bytes)
        return Shares(programs, MIN_QUERY_ROWS, _STAGES, num_kv_heads, 4)
    programs = _STREAM_WARPS // stream_warps
    # Tiles of twice the tokens where as many have room. On an H200 256 contexts of 192 tokens and as many of 100 to
    # 8,000 took 21.5 and 121 us instead of 23.3 and 128 with 38 heads and 2 of keys; with 28 and 4, where one fits
    # instead of three, 29.9 and 217 instead of 29.3 and 213.
    if programs * token_bytes * 2 <= _TOKEN_BYTES:
        return Shares(multiprocessors * programs, 2 * MIN_QUERY_ROWS, _STAGES, stream_warps, 2)
    return Shares(multiprocessors * programs, MIN_QUERY_ROWS, _STAGES, stream_warps, 4)


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """The tile of a program for a chunk of a prompt, and what it is for; None: any."""

    most_programs: int | None
    most_dims: int | None  # of a head
    keys: int
    warps: int
    stages: int = 2


# Where no more run than at once (an H200 has 132 multiprocessors), one that waits less often is worth more than many;
# large tiles fit into shared memory for heads of up to 128 dimensions.
PREFILL_TILES = (PrefillTile(132, 128, 128, 4), PrefillTile(None, 128, 64, 4), PrefillTile(None, None, 64, 8))


def find_prefill_tile(programs: int, head_dim: int) -> PrefillTile:
    """Of so many programs."""
    return next(
        tile for tile in PREFILL_TILES if _is_upto(programs, tile.most_programs) and _is_upto(head_dim, tile.most_dims)
    )


def _is_upto(value: int, most: int | None) -> bool:
    return most is None or value <= most


@dataclass(frozen=True, slots=True)
class LatentTile:
    """The tile of a program of latent attention."""

    rows: int  # heads of its tokens
    tokens: int  # of the cache
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class LatentCut:
    """The cut of contexts into the work of programs."""

    splits: int  # of a context, at most
    split_tokens: int  # a split reads at least so many, unless the context is shorter
    tile: LatentTile


_LATENT_SPLIT_TOKENS = 128
_MOST_LATENT_RANK = 512  # of which more than 16 rows have sums in registers
# Nobody has measured these: the first fits into a Hopper's shared memory and the registers of eight warps, the others
# are for fewer rows and for cards with less.
_LATENT_TILES = (LatentTile(64, 64, 8, 2), LatentTile(32, 32, 4, 2), LatentTile(16, 32, 4, 2), LatentTile(16, 16, 4, 2))


def find_latent_tile(rows: int, rank: int, row_bytes: int, shared_bytes: int) -> LatentTile:
    """Of so many rows, each of which takes `row_bytes` as one of the cache does; `shared_bytes`: of a program."""
    most_rows = MIN_QUERY_ROWS if rank > _MOST_LATENT_RANK else max(MIN_QUERY_ROWS, 2 * rows - 1)
    return next(
        (
            tile
            for tile in _LATENT_TILES
            if tile.rows <= most_rows and (tile.rows + tile.stages * tile.tokens) * row_bytes <= shared_bytes
        ),
        _LATENT_TILES[-1],
    )


def find_latent_cut(
    sequences: int, num_heads: int, tile: LatentTile, most_tokens: int, multiprocessors: int
) -> LatentCut:
    """Of contexts of at most `most_tokens`, for a device that has so many multiprocessors: a program for each, as far
    as contexts are long enough.
    """
    programs = sequences * -(-num_heads // tile.rows)
    splits = min(multiprocessors // programs, -(-most_tokens // _LATENT_SPLIT_TOKENS))
    return LatentCut(max(1, splits), _LATENT_SPLIT_TOKENS, tile)


@dataclass(frozen=True, slots=True)
class ExpandedTile:
    """The tile of a program of latent attention whose keys and values were made of latents."""

    tokens: int  # of a context
    warps: int
    stages: int


_EXPANDED_TILES = (ExpandedTile(64, 8, 3), ExpandedTile(64, 8, 2), ExpandedTile(32, 8, 2), ExpandedTile(16, 4, 1))


def find_expanded_tile(query_bytes: int, token_bytes: int, shared_bytes: int) -> ExpandedTile:
    """Of queries that take so many bytes and tokens of a context that take so many each, of a head; `shared_bytes`: of
    a program.
    """
    return next(
        (each for each in _EXPANDED_TILES if query_bytes + each.stages * each.tokens * token_bytes <= shared_bytes),
        _EXPANDED_TILES[-1],
    )
