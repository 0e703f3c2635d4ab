"""Products with weights of 4-bit integers against what these stand for, in whatever groups and splits."""

import pytest
import torch
from hopper import compile_for_hopper
from kernel_inputs import DEVICE, DTYPE, LINES, assert_near, randn
from torch import Tensor

from worker_svc.core.formats.int4 import Int4, Int4Format, Integers, ToInt4, widen_integers
from worker_svc.core.formats.interface import Piece, Tensors
from worker_svc.core.kernels.linear.int4_rows import Int4Rows
from worker_svc.core.kernels.linear.int4_widening import widen
from worker_svc.core.kernels.linear.table import Choices
from worker_svc.core.kernels.linear.ways import Int4Tile, Kind, Product
from worker_svc.core.layers.norm import RMSNorm
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.spec import NormSpec
from worker_svc.core.operations.int4_multiplier import Int4Multiplier

KERNELS = "worker_svc.core.kernels.linear"


class Stored:
    """Implement `IntegersFormat`: of these integers."""

    is_int4 = True
    pieces: tuple[Piece, ...] = ()

    def __init__(self, integers: Integers, group: int | None) -> None:
        self.integers, self.group = integers, group

    def read(self, tensors: Tensors) -> Integers:
        return self.integers

    def widen(self, tensors: Tensors) -> Tensor:
        return widen_integers(self.integers, self.group)


def weight_of(outputs: int, inputs: int, group: int | None, seed: int = 2) -> tuple[Int4, Tensor]:
    """As kernels have it, and the floats that it stands for."""
    generator = torch.Generator().manual_seed(seed)
    groups = 1 if group is None else -(-inputs // group)
    numbers = torch.randint(16, (outputs, inputs), generator=generator, dtype=torch.int32)
    zeros = torch.randint(16, (outputs, groups), generator=generator, dtype=torch.int32)
    scales = (torch.rand(outputs, groups, generator=generator) * 0.2 * inputs**-0.5).half().float()
    stored = Stored(Integers(numbers, zeros, scales), group)
    made = ToInt4(stored).convert({})
    packed = Int4Format(group).pack({name: each.contiguous().to(DEVICE) for name, each in made.items()}, inputs)
    return packed, stored.widen({}).to(DEVICE)


def norm_of(size: int) -> RMSNorm:
    norm = RMSNorm(Placement(DEVICE, DTYPE), NormSpec("norm", 1e-6), size)
    norm.weight.copy_(1 + randn(size, seed=3, scale=0.2))
    return norm


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, None])
@pytest.mark.parametrize("rows", [1, 18, 40, 260])
def test_products_are_those_of_what_weights_stand_for(group: int | None, rows: int) -> None:
    outputs, inputs = 128, 512
    weight, floats = weight_of(outputs, inputs, group)
    multiplier, floats = Int4Multiplier(LINES), floats.double()
    x, bias, residual = randn(rows, inputs, seed=1), randn(outputs, seed=4), randn(rows, outputs, seed=5)
    expected = x.double() @ floats.t()
    assert_near(multiplier.multiply(x, weight, None), expected)
    assert_near(multiplier.multiply(x, weight, bias), expected + bias)
    assert_near(multiplier.add(x, weight, bias, residual.clone()), expected + bias + residual)
    norm = norm_of(inputs)
    normed = norm.normalize(x).double() @ floats.t()
    found = multiplier.of_normed(x, norm, weight, bias)
    assert (found is not None) == (rows <= 16)
    if found is not None:
        assert_near(found, normed + bias)
    gates = multiplier.gated(x, norm, weight, None)
    assert (gates is not None) == (rows <= 256)
    if gates is not None:
        gate, up = normed.chunk(2, -1)
        assert_near(gates, torch.nn.functional.silu(gate) * up)
    assert multiplier.gated(x, norm, weight, None, is_gelu=True) is None
    assert multiplier.gated(x, norm, weight, bias) is None


@pytest.mark.parametrize("tile", [Int4Tile(64, 16, 4, 3, 4), Int4Tile(64, 64, 2, 3, 4, scaled=True)])
def test_splits_add_up_and_counters_are_as_they_were(tile: Int4Tile) -> None:
    weight, floats = weight_of(192, 896, 128)
    rows, x = Int4Rows(), randn(20, 896, seed=1)
    for _ in range(2):
        assert_near(rows.multiply(x, weight, tile), x.double() @ floats.double().t())


@pytest.mark.parametrize("group", [16, 64, 128, None])
def test_widened_weights_are_rounded_once(group: int | None) -> None:
    weight, floats = weight_of(192, 384, group)
    assert widen(weight, DTYPE, 0, 192).equal(floats.to(DTYPE))
    assert widen(weight, DTYPE, 64, 128).equal(floats[64:128].to(DTYPE))
    assert weight.widen(torch.float32).equal(floats)


@pytest.mark.parametrize(
    ("kind", "outputs", "inputs"),
    [
        ("normed", 6144, 4096),
        ("added", 4096, 12288),
        ("gated", 24576, 4096),
        ("added", 3584, 18944),
        ("gated", 37888, 3584),
        ("plain", 1024, 1024),
    ],
)
@pytest.mark.parametrize("group", [32, 128, 1024])
def test_weights_that_formats_take_have_kernels(kind: Kind, outputs: int, inputs: int, group: int) -> None:
    assert Int4Format(group).takes(outputs, inputs)
    for rows in (1, 2, 16, 17, 32, 33, 64, 65, 256):
        asked: Kind = "plain" if kind == "normed" and rows > 16 else kind
        product = Product(asked, outputs, inputs, "bfloat16", group)
        assert isinstance(Choices(LINES, (Int4Tile,)).find(product, rows), Int4Tile)
    assert not Int4Format(group).takes(outputs, inputs + 64)
    assert not Int4Format(group).takes(outputs + 64, inputs)
    assert not Int4Format(48).takes(outputs, inputs)


def launch() -> None:
    weight = Int4(torch.zeros(256, 32, 16, dtype=torch.int32), torch.zeros(32, 256), 4096, 128)
    for rows, way in ((1, Int4Tile(64, 16, 4, 4, 4, ahead=4)), (30, Int4Tile(64, 32, 1, 3, 4, blocks=2, ahead=4))):
        Int4Rows().multiply(torch.zeros(rows, 4096, dtype=torch.bfloat16), weight, way)


def test_numbers_go_to_a_hopper_s_matrix_units_from_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_for_hopper(monkeypatch, f"{KERNELS}.int4_rows._int4_rows", "wgmma", launch)
