"""The tuner on weights of 8-bit floats and integers of 4 bits, and the layers that it takes for such."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_inputs import DEVICE, DTYPE, randn
from told_measure import INPUTS, OUTPUTS, FakeMeasure
from torch import Tensor

from contract.domain.errors import ErrorCode, PenstockError
from penstock.launcher.layout import BUNDLED_MODEL
from worker_svc import tuner as module
from worker_svc.core.formats.fp8_channel import Fp8Channel, round_rows
from worker_svc.core.kernels.linear.candidates import candidates
from worker_svc.core.kernels.linear.product import FP8_FORMS, FP8_GROUPS, FP8_W8A8, FP8_W8A16, INT4, Kind, Product
from worker_svc.core.kernels.linear.table import Choices
from worker_svc.core.kernels.linear.ways import (
    CUBLAS,
    Cublas,
    Fp8BatchTile,
    Fp8FewRowsTile,
    Fp8OneRowTile,
    RowStreamTile,
)
from worker_svc.core.operations.int4_kernels import Int4Kernels
from worker_svc.tuner import Finding, Tuner, TuningOptions, tune_model


@pytest.mark.parametrize(("kind", "rows"), [("normed", 1), ("added", 20), ("plain", 70), ("gated", 3)])
@pytest.mark.parametrize("group", [32, None])
def test_each_candidate_of_integers_of_4_bits_computes_the_right_product(
    kind: Kind, rows: int, group: int | None
) -> None:
    measure, of_int4 = FakeMeasure(), Product(kind, OUTPUTS, INPUTS, INT4, group)
    [finding] = Tuner(DEVICE, (), None, measure, DTYPE).tune([of_int4], [rows])
    assert measure.asked == [set(candidates(of_int4, rows))]
    assert len(measure.asked[0]) > 2
    assert finding.standing == CUBLAS


@pytest.mark.parametrize(("kind", "rows"), [("normed", 1), ("added", 1), ("gated", 1), ("plain", 20), ("gated", 3)])
@pytest.mark.parametrize("form", FP8_FORMS)
def test_each_candidate_of_8_bit_floats_computes_the_right_product(kind: Kind, rows: int, form: str) -> None:
    measure, of_fp8 = FakeMeasure(), Product(kind, OUTPUTS, INPUTS, form, 64 if form == FP8_GROUPS else None)
    [finding] = Tuner(DEVICE, (), None, measure, DTYPE).tune([of_fp8], [rows])
    is_gpu = DEVICE.type == "cuda"
    everything = {
        way for way in candidates(of_fp8, rows) if is_gpu or not isinstance(way, Fp8BatchTile | RowStreamTile)
    }
    assert measure.asked[0] <= everything if is_gpu else measure.asked == [everything]
    assert len(measure.asked[0]) > 2
    assert finding.standing == CUBLAS


def test_what_is_computed_while_kernels_are_only_compiled_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_only(_: Tuner, calls: Iterable[Callable[[int], Tensor]]) -> None:
        # Torch adds up in place what a kernel that was not launched left in new memory.
        with monkeypatch.context() as patch:
            patch.setattr(Int4Kernels, "widen", lambda *_: torch.full((OUTPUTS, INPUTS), torch.nan, dtype=DTYPE))
            for call in calls:
                call(0)

    monkeypatch.setattr(Tuner, "_compile", compile_only)
    measure, of_int4 = FakeMeasure(), Product("added", OUTPUTS, INPUTS, INT4, 128)
    [finding] = Tuner(torch.device("cpu"), (), None, measure, DTYPE).tune([of_int4], [3])
    assert measure.asked == [set(candidates(of_int4, 3))]
    assert finding.standing == CUBLAS


@pytest.mark.parametrize("form", FP8_FORMS)
def test_what_is_found_of_8_bit_floats_is_of_such_weights_alone(form: str) -> None:
    of_fp8, best = Product("plain", OUTPUTS, INPUTS, form), Fp8FewRowsTile(64, 64, 2, 4)
    kept = Tuner(DEVICE, (), None, FakeMeasure({best: 1.0}), DTYPE)
    [finding] = kept.tune([of_fp8], [2])
    assert finding.is_better
    found = Choices(kept.lines(), (Cublas, Fp8OneRowTile, Fp8FewRowsTile))
    assert found.find(of_fp8, 2) == best
    others = {*FP8_FORMS, INT4, "bfloat16"} - {form}
    assert {found.find(replace(of_fp8, dtype=each), 2) for each in others} == {CUBLAS}


def test_rows_of_8_bit_floats_are_rounded_after_their_norm() -> None:
    # What the tuner compares ways with: rows in 8 bits are off by some percent, which a wrong way may not be.
    x, residual, weight = randn(3, 64, seed=1), randn(3, 64, seed=3), randn(64, 64, seed=2, dtype=torch.float32)
    for form in (FP8_W8A8, FP8_W8A16):
        packed = Fp8Channel(*round_rows(weight), rounds_inputs=form == FP8_W8A8)
        rows = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
        if form == FP8_W8A8:
            rounded, scales = round_rows(rows.to(DTYPE))
            rows = rounded.double() * scales
        right = rows @ (packed.weight.double() * packed.scales).t()
        of_fp8 = Product("normed", 64, 64, form)
        normed = Tuner(DEVICE, (), None, FakeMeasure(), DTYPE)._expected(of_fp8, x, residual, packed)
        assert float((normed - right).norm() / right.norm()) < 5e-3


def tuned_products(
    directory: Path, monkeypatch: pytest.MonkeyPatch, stored: object, quantization: str | None = None
) -> list[Product]:
    """Those of the bundled model, stored so."""
    shutil.copytree(BUNDLED_MODEL, directory)
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    asked: list[Product] = []

    class Asking(Tuner):
        def tune(self, products: Sequence[Product], sizes: Sequence[int]) -> Iterator[Finding]:
            asked.extend(products)
            return iter(())

    monkeypatch.setattr(module, "Tuner", Asking)
    options = TuningOptions(str(directory), dtype="float16", quantization=quantization, out=directory / "table.json")
    tune_model(options, DEVICE, lambda _: FakeMeasure(), lambda _: None)
    return asked


def test_layers_of_integers_of_4_bits_are_tuned_as_such_and_the_head_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = tuned_products(tmp_path / "dense", monkeypatch, None)
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    int4 = tuned_products(tmp_path / "int4", monkeypatch, awq)
    assert [replace(each, dtype="float16", group=None) for each in int4] == dense
    assert {(each.dtype, each.group) for each in int4} == {("float16", None), (INT4, 32)}
    assert [each.dtype for each in int4 if each.outputs == dense[0].outputs] == ["float16", "float16"]


def test_layers_of_8_bit_floats_are_tuned_as_such_and_the_head_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = tuned_products(tmp_path / "dense", monkeypatch, None)
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    alone = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    for number, (stored, quantization, form) in enumerate(
        [
            (None, "fp8", FP8_W8A8),
            ({"quant_method": "fp8", "activation_scheme": "static"}, None, FP8_W8A8),
            (alone, None, FP8_W8A16),
            ({"quant_method": "fp8", "weight_block_size": [128, 64]}, None, FP8_GROUPS),
        ]
    ):
        fp8 = tuned_products(tmp_path / str(number), monkeypatch, stored, quantization)
        assert [replace(each, dtype="float16", group=None) for each in fp8] == dense
        assert {(each.dtype, each.group) for each in fp8} == {
            ("float16", None),
            (form, 64 if form == FP8_GROUPS else None),
        }
        assert [each.dtype for each in fp8 if each.outputs == dense[0].outputs] == ["float16", "float16"]


def test_products_of_weights_that_are_widened_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    any_order = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    # Of blocks of 16 inputs one row alone has a kernel.
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    for stored in (any_order, blocks):
        method = stored["quant_method"]
        with pytest.raises(PenstockError, match=f"weights of {method} that are widened") as caught:
            tuned_products(tmp_path / str(method), monkeypatch, stored)
        assert caught.value.code is ErrorCode.UNIMPLEMENTED
