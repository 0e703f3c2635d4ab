"""Ways to compute a product with a weight, as tables of tuning have them: a kernel and its tile, or cuBLAS."""

from typing import ClassVar, TypeAlias

import msgspec

from worker_svc.core.kernels.linear.product import BFLOAT16, FP8_FORMS, FP8_GROUPS, FP8_W8A8, INT4, NARROW, Product

MULTIPROCESSORS = 132  # of an H200: programs of `BatchTile` that wait for each other must all run at once
MOST_FEW_ROWS = 64
MOST_FEW_TILES = 132  # of split products: each has a counter
_MIN_COLUMNS = 64
MOST_FP8_FEW_ROWS = 256
MOST_FP8_TILE_ROWS, _LEAST_FP8_TILE_ROWS = 128, 16
_FP8_VECTOR = 16  # inputs that are read at once
_HALF = (BFLOAT16, "float16")
_MULTIPROCESSOR_BYTES, _PROGRAM_BYTES = 228 * 1024, 2048  # of shared memory; of these, what a program has beside tiles
_MOST_ROW_VALUES = 160  # of a row, that a thread of `RowStreamTile` holds
MOST_BATCH_SPLITS = 8
_SHARED_BYTES = 227 * 1024  # that a program can have on a Hopper, less what barriers take
_BARRIER_BYTES = 16
_MANY_ALIGNMENT = 128
INT4_BLOCK = 128  # inputs of a weight of 4 bits that stand together
MOST_INT4_TILES = 4096  # of split products: each has a counter
STREAMED_INT4_OUTPUTS, STREAMED_INT4_ROWS = 128, (128, 256)  # of a tile of `Int4StreamTile`
_FEWEST_INT4_ROWS = 16  # of a tile, as matrix units have it
MOST_SPLIT_TILES, MOST_SPLIT_VALUES = 1024, 1 << 20  # of `ManyRowsTile`


class _Way(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="kernel"):
    """In tables a way has the name of its kernel as `kernel`."""


class OneRowTile(_Way, frozen=True, tag="one_row"):
    """Of a single row's product by `row_linear`; of smaller weights as many outputs of it as divide theirs."""

    outputs: int
    inputs: int  # of a step, see `step`
    warps: int
    in_thread: bool = False  # inputs are added up within a thread first: fewer registers, more programs at once
    late: bool = False  # the scale of a norm is multiplied last

    def __post_init__(self) -> None:
        _require_powers_of_two(outputs=self.outputs, inputs=self.inputs, warps=self.warps)

    def step(self, inputs: int) -> int:
        """Of so many inputs those of a step; the last one is not full where these do not divide them."""
        return min(self.inputs, 1 << (inputs - 1).bit_length())

    def fits(self, product: Product, rows: int) -> bool:
        """Return whether the product of so many rows can be computed so."""
        return rows == 1 and product.inputs % _MIN_COLUMNS == 0 and product.dtype not in NARROW


class FewRowsTile(_Way, frozen=True, tag="few_rows"):
    """Of a few rows' product by `FewRows`, which is cut along the inputs, too."""

    outputs: int  # of a tile
    inputs: int  # of a step of its loop
    splits: int  # of the inputs
    stages: int  # tiles on their way at once
    ahead: int = 0  # inputs of an output that are asked for before the kernels ahead have ended

    def __post_init__(self) -> None:
        _require_powers_of_two(outputs=self.outputs, inputs=self.inputs, splits=self.splits)
        _require_whole_steps(self.ahead, self.inputs)

    def programs(self, product: Product) -> int:
        """The programs that compute it."""
        return product.outputs // self.outputs * self.splits

    def fits(self, product: Product, rows: int) -> bool:
        """Return whether the product of so many rows can be computed so."""
        divides = product.outputs % self.outputs == 0 and product.inputs % (self.splits * self.inputs) == 0
        divides &= self.splits * self.ahead <= product.inputs
        has_counters = self.splits == 1 or product.outputs // self.outputs <= MOST_FEW_TILES
        is_there = product.kind in ("plain", "biased", "added") and product.dtype not in NARROW
        return is_there and 1 < rows <= MOST_FEW_ROWS and divides and has_counters


class _BatchTile(_Way, frozen=True):
    """Of all rows of a batch by `BatchRows`: a program does one tile after the other, or as many programs the splits of
    one.
    """

    _value_bytes: ClassVar[int]

    rows: int  # that there is room for: 64 or 128
    wide: int  # outputs of a tile; of a gated product half of them are gates, half ups
    narrow: int  # and so many more: with 128 and 64 outputs of 192
    inputs: int  # of a step
    splits: int  # of the inputs
    stages: int  # steps whose tiles are on their way at once

    def __post_init__(self) -> None:
        _require_powers_of_two(wide=self.wide, inputs=self.inputs)
        if self.rows not in (64, 128) or not 1 <= self.splits <= MOST_BATCH_SPLITS:
            raise ValueError(f"batch_rows has tiles of 64 or 128 rows and 1 to {MOST_BATCH_SPLITS} splits")
        num_bytes = (self.outputs + self.rows) * self.inputs * self._value_bytes
        if self.stages * (num_bytes + _BARRIER_BYTES) > _SHARED_BYTES:
            raise ValueError(f"batch_rows has no shared memory for {self.stages} stages of such tiles")

    @property
    def outputs(self) -> int:
        """Of a tile."""
        return self.wide + self.narrow

    def programs(self, product: Product) -> int:
        """The programs that compute it, if so many run at once."""
        return product.outputs // self.outputs * self.splits

    def fits(self, product: Product, rows: int) -> bool:
        """Return whether the product of so many rows can be computed so."""
        if rows > self.rows:
            return False
        divides = product.outputs % self.outputs == 0 and product.inputs % self.inputs == 0
        divides &= product.inputs >= self.splits * self.inputs  # splits may have a step more than others
        meets = self.splits == 1 or (product.kind != "gated" and self.programs(product) <= MULTIPROCESSORS)
        return divides and meets


class BatchTile(_BatchTile, frozen=True, tag="batch_rows"):
    """The same of weights and rows of 16 bits."""

    _value_bytes = 2

    # Programs have even shares of all tiles' steps, which cut tiles. Of gates alone: of what is not gated, splits took
    # less in each of 25 products on an H200, and whole tiles of gates in 8-bit floats.
    stream_k: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream_k and (self.narrow or self.splits > 1):
            raise ValueError("tiles of batch_rows with even shares have neither splits nor a narrow part")

    def share(self, product: Product) -> int:
        """The steps of a program that has an even share; the last one may have fewer."""
        return -(-self._num_steps(product) // MULTIPROCESSORS)

    def programs(self, product: Product) -> int:
        """The programs that compute it, if so many run at once."""
        if self.stream_k:
            return -(-self._num_steps(product) // self.share(product))
        return super().programs(product)

    def fits(self, product: Product, rows: int) -> bool:
        """Return whether the product of so many rows can be computed so."""
        is_there = product.kind != "normed" and product.dtype == BFLOAT16
        is_there &= not self.stream_k or product.kind == "gated"
        return is_there and super().fits(product, rows)

    def _num_steps(self, product: Product) -> int:
        return product.outputs // self.outputs * (product.inputs // self.inputs)


class Fp8BatchTile(_BatchTile, frozen=True, tag="fp8_batch_rows"):
    """The same of weights and rows of 8-bit floats."""

    _value_bytes = 1

    def fits(self, product: Product, rows: int) -> bool:
        """Return whether the product of so many rows can be computed so."""
        return product.dtype == FP8_W8A8 and super().fits(product, rows)


class Fp8OneRowTile(_Way, frozen=True, tag="fp8_one_row"):
    """Of a single row's product with 8-bit floats by `fp8_row_linear`. A step has no more inputs than there are: on an
    H100 steps of 16,384 gave what is no number of 12,288 inputs at times, and why was not found.
    """

    outputs: int  # of a tile; of a gated product so many gates and as many ups
    inputs: int  # of a step
    warps: int

    def __post_init__(self) -> None:
        _require_powers_of_two(outputs=self.outputs, inputs=self.inputs, warps=self.warps)

    def fits(self, product: Product, rows: int) -> bool:
        """Return whether the product of so many rows can be computed so."""
        is_there = product.dtype in FP8_FORMS and product.inputs % _FP8_VECTOR == 0
        has_groups = product.dtype != FP8_GROUPS or (product.group or 0) % _FP8_VECTOR == 0
        return rows == 1 and is_there and has_groups and product.inputs >= self.inputs


class RowStreamTile(_Way, frozen=True, tag="row_stream"):
    """Of a single row's product by `stream_row`: by programs that take one tile after the other. Weights have 16 bits,
    or are 8-bit floats, to which the row is rounded.
    """

    outputs: int  # of a tile; of a gated product so many gates and as many ups
    inputs: int  # of a step
    warps: int
    programs: int  # of a multiprocessor; those for which it has no registers begin when others have ended
    stages: int  # steps that are on their way at once
    early: int  # of these: that are asked for before the kernels ahead have ended

    def __post_init__(self) -> None:
        _require_powers_of_two(outputs=self.outputs, inputs=self.inputs, warps=self.warps)
        if self.programs < 1 or not 1 <= self.early <= self.stages:
            raise ValueError("row_stream has one program or more, and asks for 1 to `stages` steps early")

    def fits(self, product: Product, rows: int) -> bool:
        """Return whether the product of so many rows can be computed so."""
        if rows != 1 or product.dtype not in (*_HALF, FP8_W8A8):
            return False
        value_bytes = 1 if product.dtype == FP8_W8A8 else 2
        steps = -(-product.inputs // self.inputs)
        of_thread = self.inputs // (32 * self.warps)  # of a row, in a step
        step_bytes = self.outputs * (2 if product.kind == "gated" else 1) * self.inputs * value_bytes
        has_vectors = product.inputs % _FP8_VECTOR == 0 and of_thread * value_bytes >= _FP8_VECTOR
        has_registers = steps * of_thread <= _MOST_ROW_VALUES
        shared_bytes = self.programs * (self.stages * step_bytes + _PROGRAM_BYTES)
        return has_vectors and has_registers and shared_bytes <= _MULTIPROCESSOR_BYTES


class Fp8FewRowsTile(_Way, frozen=True, tag="fp8_few_rows"):
    """Of a few rows' product with 8-bit floats by `Fp8FewRows`, which is cut along the inputs, too."""

    outputs: int  # of a tile; of a gated product so many gates and as many ups
    inputs: int  # of a step of its loop
    splits: int  # of the inputs
    stages: int  # tiles on their way at once
    warps: int = 4
    ahead: int = 0  # inputs of an output that are asked for before the kernels ahead have ended

    def __post_init__(self) -> None:
        _require_powers_of_two(outputs=self.outputs, inputs=self.inputs, splits=self.splits, warps=self.warps)
        _require_whole_steps(self.ahead, self.inputs)

    def programs(self, product: Product) -> int:
        """The programs that compute it."""
        return product.outputs // self.outputs * self.splits

    def fits(self, product: Product, rows: int) -> bool:
        """Return whether the product of so many rows can be computed so."""
        if product.dtype not in FP8_FORMS or not 1 <= rows <= MOST_FP8_FEW_ROWS:
            return False
        outputs = product.made
        divides = outputs % self.outputs == 0 and product.inputs % (self.splits * self.inputs) == 0
        divides &= self.splits * self.ahead <= product.inputs
        has_groups = product.dtype != FP8_GROUPS or (product.group or 0) % self.inputs == 0
        has_counters = self.splits == 1 or outputs // self.outputs <= MOST_FEW_TILES
        return divides and has_groups and has_counters and self._shared_bytes(product, rows) <= _SHARED_BYTES

    def _shared_bytes(self, product: Product, rows: int) -> int:
        """The shared memory of a program, as Triton has it: weights that meet rows of 16 bits go on to registers, and
        are a step less ahead.
        """
        weights = self.outputs * self.inputs * (2 if product.kind == "gated" else 1)
        rounds = product.dtype == FP8_W8A8
        of_rows = fp8_tile_rows(rows) * self.inputs * (1 if rounds else 2)
        return (self.stages if rounds else self.stages - 1) * weights + self.stages * of_rows


class ManyRowsTile(_Way, frozen=True, tag="many_rows"):
    """The tile that a program of quack-kernels multiplies at a time, by `ManyRows`."""

    rows: int
    outputs: int  # of a gated product half of them are gates, half ups
    cluster: tuple[int, int]  # programs along the rows and the outputs
    takes_turns: bool = False  # its warps multiply two tiles, one while the other ends
    is_early: bool = False  # the weight's first tiles are asked for before the kernel ahead has ended
    is_swapped: bool = False  # the weight is the product's first operand: outputs take the matrix units' long side
    splits: int = 1  # of the inputs

    def padded(self, rows: int, outputs: int) -> tuple[int, int]:
        """The tiles along rows and outputs, in whole clusters."""
        by_rows, by_outputs = (
            -(-size // (each * programs)) * programs
            for size, each, programs in zip((rows, outputs), (self.rows, self.outputs), self.cluster, strict=True)
        )
        return by_rows, by_outputs

    def turns(self, rows: int, outputs: int) -> int:
        """The tiles that a multiprocessor takes one after the other, the busiest one."""
        by_rows, by_outputs = self.padded(rows, outputs)
        programs = self.cluster[0] * self.cluster[1]
        return -(-by_rows * by_outputs // (MULTIPROCESSORS // programs * programs))

    def fits(self, product: Product, rows: int) -> bool:
        """Return whether the product of so many rows can be computed so."""
        if product.kind not in ("plain", "added", "gated") or product.dtype != BFLOAT16 or rows < 1:
            return False
        if product.kind == "gated" and (self.splits > 1 or self.is_swapped):
            return False
        by_rows, by_outputs = self.padded(rows, product.outputs)
        tiles, size = by_rows * by_outputs, self.rows * self.outputs
        has_room = self.splits == 1 or (tiles <= MOST_SPLIT_TILES and tiles * size <= MOST_SPLIT_VALUES)
        return has_room and product.outputs % _MANY_ALIGNMENT == 0 and product.inputs % _MANY_ALIGNMENT == 0


class Int4Tile(_Way, frozen=True, tag="int4_rows"):
    """Of any rows with a weight of 4 bits by `Int4Rows`."""

    outputs: int  # of a tile
    rows: int
    splits: int  # of the inputs
    stages: int  # steps on their way at once
    warps: int
    blocks: int = 1  # of 128 inputs, of a step
    scaled: bool = False  # scales are multiplied with numbers, else with sums: fewer of these than numbers, if few rows
    ahead: int = 0  # blocks of an output that are asked for before the kernels ahead have ended

    def __post_init__(self) -> None:
        _require_powers_of_two(outputs=self.outputs, rows=self.rows, splits=self.splits, blocks=self.blocks)
        if self.warps not in (4, 8) or self.outputs % (16 * self.warps):
            raise ValueError("int4_rows has 4 or 8 warps, of 16 outputs each or a multiple")
        if self.rows < _FEWEST_INT4_ROWS:
            raise ValueError(f"a tile of int4_rows has {_FEWEST_INT4_ROWS} rows or more")

    def programs(self, product: Product) -> int:
        """The programs that compute it, for rows of one tile."""
        return product.made // self.outputs * self.splits

    def fits(self, product: Product, rows: int) -> bool:
        """Return whether the product of so many rows can be computed so."""
        if product.dtype != INT4 or product.inputs % INT4_BLOCK or rows < 1:
            return False
        outputs, num_blocks, group = product.made, product.inputs // INT4_BLOCK, product.group
        tiles = outputs // self.outputs * -(-rows // self.rows)
        has_counters = self.splits == 1 or tiles <= MOST_INT4_TILES
        in_blocks = group is None or group % INT4_BLOCK == 0
        has_groups = in_blocks or (self.scaled and group in (16, 32, 64))
        divides = outputs % self.outputs == 0 and num_blocks >= self.splits * max(self.blocks, self.ahead)
        divides &= self.blocks == 1 or num_blocks % (self.splits * self.blocks) == 0
        return divides and has_counters and has_groups


class Int4StreamTile(_Way, frozen=True, tag="int4_stream"):
    """Of many rows with a weight of 4 bits by `multiply_int4_stream`: tiles have 128 outputs."""

    rows: int = 256  # of a tile, or 128
    stream_k: bool = False  # programs have even shares of all tiles' inputs, and parts of tiles are added up after that

    def __post_init__(self) -> None:
        if self.rows not in STREAMED_INT4_ROWS:
            raise ValueError(f"tiles of `Int4StreamTile` have 128 or 256 rows, not {self.rows}")

    def programs(self, product: Product) -> int:
        """The tiles of so many rows."""
        return product.outputs // STREAMED_INT4_OUTPUTS

    def fits(self, product: Product, rows: int) -> bool:
        """Return whether the product of so many rows can be computed so."""
        if product.dtype != INT4 or product.inputs % INT4_BLOCK or rows < 1:
            return False
        has_blocks = (product.group or INT4_BLOCK) % INT4_BLOCK == 0
        return has_blocks and product.outputs % STREAMED_INT4_OUTPUTS == 0


class Cublas(_Way, frozen=True, tag="cublas"):
    """By a library of torch's: of 8-bit floats torch's own product, or cuBLASLt's where that adds it to a residual, of
    weights with scales for groups that of floats which they are widened to. Of normed and gated products the rest is
    done by kernels of its own.
    """

    lt: bool = False  # by cuBLASLt, else by the library that torch prefers
    rows: int | None = None  # of a piece: a product that is added is done in such; None: in one

    def fits(self, product: Product, rows: int) -> bool:  # noqa: ARG002
        """Return whether the product of so many rows can be computed so; narrow weights have no other library."""
        if product.dtype in NARROW:
            return self == CUBLAS
        return self.rows is None or (product.kind == "added" and self.rows > 0)


Way: TypeAlias = (
    OneRowTile
    | FewRowsTile
    | BatchTile
    | Fp8BatchTile
    | ManyRowsTile
    | Cublas
    | Fp8OneRowTile
    | RowStreamTile
    | Fp8FewRowsTile
    | Int4Tile
    | Int4StreamTile
)

CUBLAS = Cublas()  # its own choice


def fp8_tile_rows(rows: int) -> int:
    """The rows of a tile of so many by `Fp8FewRows`: a power of two."""
    return min(MOST_FP8_TILE_ROWS, max(_LEAST_FP8_TILE_ROWS, 1 << (rows - 1).bit_length()))


def _require_powers_of_two(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1 or size & (size - 1):
            raise ValueError(f"{name} of a tile must be a power of two, not {size}")


def _require_whole_steps(ahead: int, inputs: int) -> None:
    if ahead < 0 or ahead % inputs:
        raise ValueError(f"what is asked for ahead must be whole steps of {inputs} inputs, not {ahead}")
