"""Tables of tuning: by which way a product is computed, for how many rows, on which card."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import msgspec

from worker_svc.core.kernels.linear.product import BFLOAT16, Kind, Product
from worker_svc.core.kernels.linear.ways import (
    CUBLAS,
    BatchTile,
    FewRowsTile,
    Fp8BatchTile,
    Fp8FewRowsTile,
    Int4StreamTile,
    Int4Tile,
    ManyRowsTile,
    Way,
)

Span: TypeAlias = tuple[int, int | None]  # the first and the last; None: without end

_ANY: Span = (0, None)
# Whose programs are as many as a line may ask for.
_Counted = FewRowsTile | BatchTile | Fp8BatchTile | Fp8FewRowsTile | Int4Tile | Int4StreamTile


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A card, or those that are like it."""

    capability: tuple[int, int]
    multiprocessors: int
    name: str | None = None  # None: any

    def includes(self, card: "Card") -> bool:
        """Return whether `card` is one of these."""
        return self == card or self == Card(card.capability, card.multiprocessors)


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Products, and the first of `ways` that fits is theirs. A weight that was measured has spans of one size."""

    kinds: tuple[Kind, ...]
    rows: Span
    ways: tuple[Way, ...]
    outputs: Span = _ANY
    inputs: Span = _ANY
    weights: Span = _ANY  # outputs times inputs
    has_more_outputs: bool | None = None  # than inputs; None: or not
    dtypes: tuple[str, ...] = ()  # torch's names; none: all
    rows_multiple: int = 1
    programs: Span | None = None  # as many as a way of `_Counted` may have
    why: str = ""

    def __post_init__(self) -> None:
        if self.programs is not None and not all(isinstance(way, _Counted) for way in self.ways):
            raise ValueError(
                "programs are told of ways of few_rows, batch_rows, fp8_few_rows, fp8_batch_rows, int4_rows and "
                "int4_stream only"
            )
        if self.rows[0] < 1 or self.rows_multiple < 1:
            raise ValueError("a product has one row or more")
        if misfit := self._misfit():
            raise ValueError(misfit)

    def has(self, product: Product) -> bool:
        """Return whether it is about this product, of some number of rows."""
        outputs, inputs = product.outputs, product.inputs
        return (
            product.kind in self.kinds
            and _is_in(self.outputs, outputs)
            and _is_in(self.inputs, inputs)
            and _is_in(self.weights, outputs * inputs)
            and self.has_more_outputs in (None, outputs > inputs)
            and (not self.dtypes or product.dtype in self.dtypes)
        )

    def ways_of(self, product: Product, rows: int) -> Iterator[Way]:
        """Those that fit, if it is about so many rows of this product."""
        if _is_in(self.rows, rows) and rows % self.rows_multiple == 0 and self.has(product):
            yield from (way for way in self.ways if way.fits(product, rows) and self._is_busy(way, product))

    def _is_busy(self, way: Way, product: Product) -> bool:
        """Return whether it has as many programs as are wanted."""
        if self.programs is None or not isinstance(way, _Counted):
            return True
        return _is_in(self.programs, way.programs(product))

    def _misfit(self) -> str | None:
        """The way that does not fit the one weight that this line is about, if there is such a way."""
        if self.outputs[0] != self.outputs[1] or self.inputs[0] != self.inputs[1]:
            return None
        for kind in self.kinds:
            for dtype in self.dtypes or (None,):
                product = Product(kind, self.outputs[0], self.inputs[0], dtype or BFLOAT16)
                for way in self.ways:
                    if not all(way.fits(product, rows) for rows in self.rows if rows is not None):
                        first, last = self.rows
                        return (
                            f"{way} does not fit a {kind} product of {product.outputs} outputs and {product.inputs} "
                            f"inputs, of {first} to {last or 'any number of'} rows in {product.dtype}"
                        )
        return None


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a card: what is measured of a weight stands before what is so as a rule."""

    card: Card
    lines: tuple[Line, ...]


def read_table(text: bytes) -> Table:
    """A table that is written as JSON.

    Raises:
        ValueError: it is none; the message says in a sentence which line is wrong, and how.
    """
    try:
        return msgspec.json.decode(text, type=Table)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error


def write_table(table: Table) -> bytes:
    """The table as JSON: a text line for each of its lines and ways."""
    lines = ",\n".join(map(_write_line, table.lines))
    return f'{{\n  "card": {_json(table.card)},\n  "lines": [\n{lines}\n  ]\n}}\n'.encode()


def _write_line(line: Line) -> str:
    ways = ",\n".join(f"      {_json(way)}" for way in line.ways)
    fields = {name: value for name, value in msgspec.to_builtins(line).items() if name != "ways"}
    return f'    {_json(fields)[:-1]}, "ways": [\n{ways}\n    ]}}'


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


class Choices:
    """The lines of a card's tables, in the order in which they count, and those kernels that can run."""

    def __init__(self, lines: Iterable[Line], kernels: Iterable[type]) -> None:
        self._lines = tuple(lines)
        self._kernels = frozenset(kernels)

    def find(self, product: Product, rows: int) -> Way:
        """The way of so many rows of a product: cuBLAS's own choice where no line has one."""
        for line in self._lines:
            for way in line.ways_of(product, rows):
                if type(way) in self._kernels:
                    return way
        return CUBLAS


def many_rows_tiles(lines: Iterable[Line], products: Iterable[Product]) -> dict[Kind, list[ManyRowsTile]]:
    """All tiles of `ManyRows` that may be found for these products, whatever the number of rows: they are compiled when
    a worker starts.
    """
    found: dict[Kind, dict[ManyRowsTile, None]] = {}
    for product in products:
        for line in lines:
            tiles = (way for way in line.ways if isinstance(way, ManyRowsTile) and way.fits(product, line.rows[0]))
            if line.has(product):
                found.setdefault(product.kind, {}).update(dict.fromkeys(tiles))
    return {kind: list(tiles) for kind, tiles in found.items() if tiles}


def _is_in(span: Span, value: int) -> bool:
    first, last = span
    return first <= value and (last is None or value <= last)
