"""The tuner: measures all ways of a model's products on this card, and writes a table of those that are better than
what would be chosen without it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from contract.domain.errors import broken, invalid, unimplemented
from servicekit.checkpoint.location import find_checkpoint
from servicekit.checkpoint.model import read_checkpoint
from servicekit.settings import num_cores
from worker_svc.core.distributed import Group
from worker_svc.core.formats.choice import find_multiplied
from worker_svc.core.formats.fp8_channel import Fp8ChannelFormat
from worker_svc.core.formats.fp8_groups import Fp8GroupsFormat
from worker_svc.core.formats.int4 import Int4Format
from worker_svc.core.formats.interface import Format
from worker_svc.core.kernels.compiling import compile_launches
from worker_svc.core.kernels.linear.candidates import candidates
from worker_svc.core.kernels.linear.many_rows import ManyRows, make_many_rows
from worker_svc.core.kernels.linear.norm import rms_norm
from worker_svc.core.kernels.linear.product import (
    BFLOAT16,
    FP8_GROUPS,
    FP8_W8A8,
    FP8_W8A16,
    INT4,
    NARROW,
    Kind,
    Product,
)
from worker_svc.core.kernels.linear.table import Card, Choices, Line, Table, write_table
from worker_svc.core.kernels.linear.unscaled import Unscaled
from worker_svc.core.kernels.linear.ways import (
    CUBLAS,
    BatchTile,
    Fp8BatchTile,
    Fp8FewRowsTile,
    Fp8OneRowTile,
    Int4Tile,
    Way,
)
from worker_svc.core.layers.placement import Placement
from worker_svc.core.operations.triton_operations import TritonOperations
from worker_svc.core.quantization.choice import choose_quantization
from worker_svc.core.quantization.spec import QuantizationSpec
from worker_svc.measure import Measure, Measured
from worker_svc.model_config import read_model_config
from worker_svc.product_weights import Drawing, Weight, right_product, weight_bytes
from worker_svc.products import model_products
from worker_svc.tuning import card_of, default_file, packaged_lines, read_tuned

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_KINDS_OF_ONE_ROW: tuple[Kind, ...] = ("normed", "added", "gated")
_KINDS_OF_SEVERAL: tuple[Kind, ...] = ("plain", "added", "gated")
_TOLERANCE = 2e-2  # of the whole: sums are rounded to 8 bits, gates twice
_EPS = 1e-6
_HALF = (BFLOAT16, "float16")
_HOPPER = (9, 0)
_MOST_COMPILING = 16  # kernels at a time
_FEW_ROWS = 2
_OF_NARROW = (Fp8OneRowTile, Fp8FewRowsTile, Int4Tile)
_Call = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class Finding:
    """The measures of so many rows of a product."""

    product: Product
    rows: range
    standing: Way  # what is chosen without a line
    best: Way
    times: Mapping[Way, Measured]

    @property
    def is_better(self) -> bool:
        """Return whether the best one is better than what stands, by more than both spread, or that is not right."""
        standing, best = self.times.get(self.standing), self.times[self.best]
        return standing is None or standing.median_us - best.median_us > standing.spread_us + best.spread_us

    def describe(self) -> str:
        """A line about it, for people."""
        product = self.product
        what = f"{product.kind} {product.outputs} x {product.inputs}, {self.rows[0]} to {self.rows[-1]} rows"
        verdict = f"{self._us(self.best)} us by {self.best}" if self.is_better else "stays"
        return f"{what}: {self._us(self.standing)} us by {self.standing}; {verdict}"

    def line(self) -> Line:
        """What a table says of it."""
        product = self.product
        # With a bias, a kernel reads one row more.
        kinds: tuple[Kind, ...] = ("plain", "biased") if product.kind == "plain" else (product.kind,)
        return Line(
            kinds=tuple(kind for kind in kinds if self.best.fits(replace(product, kind=kind), self.rows[-1])),
            rows=(self.rows[0], self.rows[-1]),
            ways=(self.best,),
            outputs=(product.outputs, product.outputs),
            inputs=(product.inputs, product.inputs),
            dtypes=(product.dtype,),
            why=f"{self._us(self.best)} us at {self.rows[-1]} rows, without this line {self._us(self.standing)}",
        )

    def _us(self, way: Way) -> str:
        return f"{self.times[way].median_us:.2f}" if way in self.times else "wrong in any"


@dataclass(slots=True)
class _Norm:
    """Implement `operations.interface.Norm`: of ones."""

    weight: Tensor
    is_folded: bool
    eps: float = _EPS
    is_whole: bool = True

    def normalize(self, x: Tensor) -> Tensor:
        """Implement `Norm.normalize`."""
        return x * Unscaled(x, self.eps).scales().to(x.dtype)

    def fold(self, weight: Tensor) -> None:
        """Implement `Norm.fold`."""


@dataclass(slots=True)
class _Linear:
    """Implement `operations.interface.LinearLayer`: a weight alone."""

    packed: Weight
    bias: Tensor | None = None
    is_partial: bool = False

    def multiply(self, x: Tensor) -> Tensor:
        """Implement `LinearLayer.multiply`."""
        return self.packed.multiply(x, None)

    def total(self, part: Tensor) -> Tensor:
        """Implement `LinearLayer.total`."""
        return part


class Tuner:
    """Computes products as a worker would, by one way after the other.

    Args:
        device: what computes.
        lines: that count without a new table.
        many_rows: the package that multiplies many rows, if it is there.
        measure: of calls.
        dtype: of rows, where weights are narrower than these.
    """

    def __init__(
        self,
        device: torch.device,
        lines: Sequence[Line],
        many_rows: ManyRows | None,
        measure: Measure,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._device = device
        self._drawing = Drawing(device, dtype)
        self._standing = tuple(lines)
        self._many_rows = many_rows
        self._measure = measure
        self._tuned: list[Line] = []

    def tune(self, products: Sequence[Product], sizes: Sequence[int]) -> Iterator[Finding]:
        """Measure each product with as many rows as `sizes` say: what is found holds for those after the next smaller
        one of `sizes` and `ROWS`. A better way counts at once: plain products stand in those after them.

        Raises:
            PenstockError: INTERNAL (operator): this machine computes a product rightly in no way.
        """
        ends = sorted({*ROWS, *sizes})
        for product in products:
            copies = self._measure.copies(weight_bytes(product))
            weights = [self._drawing.weight(product, seed) for seed in range(copies)]
            for before, last in zip([0, *ends], ends, strict=False):
                if last in sizes and product.kind in (_KINDS_OF_ONE_ROW if last == 1 else _KINDS_OF_SEVERAL):
                    finding = self._find(product, range(before + 1, last + 1), weights)
                    if finding.is_better:
                        self._tuned.append(finding.line())
                    yield finding

    def lines(self) -> tuple[Line, ...]:
        """Those of all that was better."""
        return tuple(self._tuned)

    def _find(self, product: Product, rows: range, weights: list[Weight]) -> Finding:
        runnable = [*self._operations(()).dense.runnable, *_OF_NARROW]
        if BatchTile in runnable:
            runnable.append(Fp8BatchTile)
        standing = Choices(self._standing, runnable).find(product, rows[-1])
        ways = [
            way
            for way in dict.fromkeys((standing, *candidates(product, rows[-1])))
            if way == standing or (type(way) in runnable and way.fits(product, rows[0]))
        ]
        x, residual = (
            self._drawing.rows(product, rows[-1], columns, seed=-1) for columns in (product.inputs, product.outputs)
        )
        calls = {way: self._call(product, way, x, residual, weights) for way in ways}
        before = residual.clone()
        self._compile(calls.values())
        residual.copy_(before)  # what is only compiled computes nothing, and a library adds whatever lies there to it
        expected = self._expected(product, x, residual, weights[0])
        right = {way: call for way, call in calls.items() if self._is_right(call, residual, expected, way)}
        if not right:
            raise broken(f"no way of {len(ways)} computes {product} rightly here: mend the driver, torch or Triton")
        timed = right if len(x) == 1 else {way: _after_norm(call, x) for way, call in right.items()}
        times = self._measure(timed, len(weights))
        best = min(times, key=lambda way: times[way].median_us)
        return Finding(product, rows, standing, best, times)

    def _call(self, product: Product, way: Way, x: Tensor, residual: Tensor, weights: list[Weight]) -> _Call:
        """Computes the product this way with one of the weights, as a worker would."""
        operations = self._operations((Line((product.kind,), (len(x), len(x)), (way,)),))
        linears = [_Linear(weight) for weight in weights]
        # As when a model is loaded: what is not scaled may be too large for fp16, and narrow weights take no norm's.
        is_folded = x.dtype is torch.bfloat16 and product.dtype not in NARROW
        norm = _Norm(torch.ones(product.inputs, dtype=x.dtype, device=x.device), is_folded)
        calls: dict[Kind, _Call] = {
            "plain": lambda copy: operations.norm_linear(x, None, linears[copy]),
            "normed": lambda copy: operations.norm_linear(x, norm, linears[copy]),
            "added": lambda copy: operations.linear_add(x, linears[copy], residual),
            "gated": lambda copy: operations.norm_gated(x, norm, linears[copy]),
        }
        return calls[product.kind]

    def _compile(self, calls: Iterable[_Call]) -> None:
        """Triton's kernels, many at a time. One that cannot be compiled says so again when it is called."""

        def call_all() -> None:
            for call in calls:
                with suppress(Exception):
                    call(0)

        if self._device.type == "cuda":
            with suppress(Exception):
                compile_launches(call_all, max(1, min(_MOST_COMPILING, int(num_cores()))))

    def _operations(self, forced: tuple[Line, ...]) -> TritonOperations:
        operations = TritonOperations(self._device, (*forced, *self._tuned, *self._standing))
        operations.dense.use_many_rows(self._many_rows)
        return operations

    def _expected(self, product: Product, x: Tensor, residual: Tensor, weight: Weight) -> Tensor:
        """By torch, in fp32."""
        y = right_product(x, weight, _EPS if product.kind in ("normed", "gated") else None)
        if product.kind == "added":
            y = y + residual.float()
        if product.kind == "gated":
            gate, up = y.chunk(2, 1)
            y = torch.nn.functional.silu(gate) * up
        return y

    def _is_right(self, call: _Call, residual: Tensor, expected: Tensor, way: Way) -> bool:
        """Return whether it computes what it should; cuBLAS is what others are compared with, and may not fail."""
        before = residual.clone()
        try:
            found = call(0).float()
            return bool((found - expected).norm() <= _TOLERANCE * expected.norm())
        except torch.OutOfMemoryError:
            raise
        # A kernel that asks for more than this card has raises whatever it likes.
        except Exception:
            if way == CUBLAS:
                raise
            return False
        finally:
            residual.copy_(before)


def _after_norm(call: _Call, x: Tensor) -> _Call:
    """The call after a norm of rows like its own, of which all measures have the time: what begins only when the kernel
    ahead has ended, as cuBLAS's products do after ours, takes longer in a step than one after the other. A single row's
    kernels are all ours, and follow each other as closely as in a step.
    """
    weight = torch.ones_like(x[0])

    def norm_and_call(copy: int) -> Tensor:
        rms_norm(x, weight, _EPS)
        return call(copy)

    return norm_and_call


@dataclass(frozen=True, slots=True)
class TuningOptions:
    """The model whose products are measured, and the table."""

    model: str  # a local directory or a hub id
    revision: str | None = None
    dtype: str = "auto"  # of weights; auto: as stored
    quantization: str | None = None  # fp8: of a dense checkpoint; None: as it is stored
    tensor_parallel_size: int = 1
    sizes: tuple[int, ...] = ROWS  # numbers of rows
    out: Path | None = None  # None: the card's own in the cache


def tune_model(
    options: TuningOptions,
    device: torch.device,
    make_measure: Callable[[torch.device], Measure],
    say: Callable[[str], None],
) -> Path:
    """Measure the products of a checkpoint on this device, and write the table: what is said of other products in the
    file stays. `say` is told of each measure. Return where the table is.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED: products of this model are not those that tables are about;
            INTERNAL (operator): there is no such model, or the file is no table.
    """
    checkpoint = read_checkpoint(find_checkpoint(options.model, options.revision))
    config = read_model_config(checkpoint)
    quantization = choose_quantization(config.quantization, options.quantization)
    name = (config.dtype or "float32") if options.dtype == "auto" else options.dtype
    if name not in _HALF:
        raise invalid(f"weights are {name}, and tables are of {' and '.join(_HALF)}: give --dtype", "dtype")
    placement = Placement(torch.device("meta"), getattr(torch, name), Group(0, options.tensor_parallel_size))
    products = model_products(config, placement)
    if quantization is not None:
        products = _as_multiplied(products, quantization)
    card = card_of(device)
    path = options.out or default_file(card)
    kept = _lines_of_others(path, card, products)
    many_rows = _find_many_rows(device, card) if name == BFLOAT16 else None
    tuner = Tuner(device, (*kept, *packaged_lines(card)), many_rows, make_measure(device), placement.dtype)
    for finding in tuner.tune(products, options.sizes):
        say(finding.describe())
    lines = (*tuner.lines(), *kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(write_table(Table(card, lines)))
    say(f"{len(tuner.lines())} lines of this model's products in {path}")
    return path


def _as_multiplied(products: Sequence[Product], quantization: QuantizationSpec) -> tuple[Product, ...]:
    """These with weights as they are multiplied.

    Raises:
        PenstockError: UNIMPLEMENTED, all are widened.
    """
    form = find_multiplied(quantization)
    found = () if form is None else _in_form(products, form)
    if not any(each.dtype in NARROW for each in found):
        raise unimplemented(
            f"tuning products with weights of {quantization.method} that are widened when they are read"
        )
    return found


def _in_form(products: Sequence[Product], form: Format) -> tuple[Product, ...]:
    """These with layers whose weights have it; the head, which is the first, has floats, and so have layers that are
    widened.
    """
    head = products[0].outputs, products[0].inputs
    if isinstance(form, Int4Format):
        dtype, group = INT4, form.group
    elif isinstance(form, Fp8GroupsFormat):
        dtype, group = FP8_GROUPS, form.group
    else:
        assert isinstance(form, Fp8ChannelFormat), "of others nothing is multiplied as it is stored"
        dtype, group = FP8_W8A8 if form.spec.rounds_inputs else FP8_W8A16, None
    narrow = [replace(each, dtype=dtype, group=group) for each in products]
    return tuple(
        each if (each.outputs, each.inputs) == head or _is_widened(stored) else stored
        for each, stored in zip(products, narrow, strict=True)
    )


def _is_widened(product: Product) -> bool:
    """Return whether its weight has scales for groups, and no kernel multiplies a few rows with it."""
    return product.dtype in (INT4, FP8_GROUPS) and candidates(product, _FEW_ROWS) == [CUBLAS]


def _lines_of_others(path: Path, card: Card, products: Sequence[Product]) -> tuple[Line, ...]:
    try:
        table = read_tuned(path, card)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise broken(f"{path} is no table for this card: {error}; remove it, or give another --out") from error
    return tuple(line for line in table.lines if not any(line.has(product) for product in products))


def _find_many_rows(device: torch.device, card: Card) -> ManyRows | None:
    if device.type != "cuda" or card.capability != _HOPPER:
        return None
    try:
        return make_many_rows(device, {})
    # As when a worker starts: a package that is not there or broken is done without.
    except Exception:  # noqa: BLE001
        return None
