"""Stored weights of experts as kernels that are compiled for a Hopper decode and multiply them."""

import importlib
from unittest.mock import MagicMock

import pytest
import torch
from hopper import compile_for_hopper
from kernel_inputs import DTYPE
from published_experts import in_blocks, of_gpt_oss, of_qwen, some_pairs

from worker_svc.core.kernels.experts.rows import add_rows, gate_rows
from worker_svc.core.kernels.experts.tiles import add_tiles, gate_tiles
from worker_svc.core.kernels.experts.weights import ExpertWeights
from worker_svc.core.kernels.experts.widening import widen

EXPERT_KERNELS = "worker_svc.core.kernels.experts"
TILES, WORD_ROWS, FLOAT_ROWS = (f"{EXPERT_KERNELS}.{name}" for name in ("tiles", "word_rows", "float_rows"))


def launch(weight: ExpertWeights, dtype: torch.dtype = torch.bfloat16, fewest: int = 8) -> None:
    for rows in (each for each in (8, 32, 64, 256, 1024) if each >= fewest):
        to, pairs = some_pairs(rows, weight.count)
        gate_tiles(torch.zeros(rows, weight.inputs, dtype=dtype), weight, None, to, pairs, activation="silu")


def launch_added(weight: ExpertWeights) -> None:
    vars(importlib.import_module(TILES))["_add_up"] = MagicMock()  # another test compiles it
    for rows in (8, 32, 64, 256, 1024):
        x = torch.zeros(rows * 4, weight.inputs, dtype=torch.bfloat16)
        residual = torch.zeros(rows, weight.outputs, dtype=torch.bfloat16)
        add_tiles(x, weight, None, *some_pairs(rows, weight.count), residual)


def launch_rows(weight: ExpertWeights, dtype: torch.dtype) -> None:
    to, _ = some_pairs(1, weight.count)
    gate_rows(torch.zeros(1, weight.inputs, dtype=dtype), weight, None, to, activation="silu")


def launch_added_rows(weight: ExpertWeights, dtype: torch.dtype) -> None:
    to, _ = some_pairs(1, weight.count)
    x, residual = torch.zeros(4, weight.inputs, dtype=dtype), torch.zeros(1, weight.outputs, dtype=dtype)
    add_rows(x, weight, None, to, residual)


@pytest.mark.parametrize(
    ("weight", "instruction"),
    [
        (of_gpt_oss(5760), "wgmma"),
        (in_blocks(), "cvt.rn.f16x2.e4m3x2"),
        *((of_qwen(1536, 2048, group), "wgmma") for group in (32, 128)),
    ],
    ids=["fp4", "fp8", "int4_32", "int4_128"],
)
def test_stored_weights_are_read_by_a_hopper_s_own_instructions(
    monkeypatch: pytest.MonkeyPatch, weight: ExpertWeights, instruction: str
) -> None:
    compile_for_hopper(monkeypatch, f"{TILES}._gate_tiles", instruction, launch, weight)


@pytest.mark.parametrize(
    "weight",
    [of_gpt_oss(2880), *(of_qwen(2048, 768, group) for group in (0, 128))],
    ids=["fp4", "int4", "int4_128"],
)
def test_products_of_four_bits_that_are_added_are_a_hopper_s_own_too(
    monkeypatch: pytest.MonkeyPatch, weight: ExpertWeights
) -> None:
    compile_for_hopper(monkeypatch, f"{TILES}._multiply_tiles", "wgmma", launch_added, weight)


@pytest.mark.parametrize("weight", [of_gpt_oss(5760), of_qwen(1536, 2048, 128)], ids=["fp4", "int4_128"])
def test_tiles_of_four_bits_fit_a_hopper_in_fp32_too(monkeypatch: pytest.MonkeyPatch, weight: ExpertWeights) -> None:
    compile_for_hopper(monkeypatch, f"{TILES}._gate_tiles", "wgmma", launch, weight, torch.float32, 256)


@pytest.mark.parametrize(
    ("group", "dtype"), [(0, torch.bfloat16), (16, torch.float16), (32, torch.bfloat16), (128, torch.float16)]
)
def test_a_few_rows_of_integers_are_decoded_in_pairs_by_a_hopper(
    monkeypatch: pytest.MonkeyPatch, group: int, dtype: torch.dtype
) -> None:
    up, down = of_qwen(1536, 2048, group), of_qwen(2048, 768, group)
    compile_for_hopper(monkeypatch, f"{WORD_ROWS}._gate_word_rows", "fma.rn.bf16x2", launch_rows, up, dtype)
    compile_for_hopper(monkeypatch, f"{WORD_ROWS}._add_word_rows", "fma.rn.bf16x2", launch_added_rows, down, dtype)
    pairs = "fma.rn.bf16x2" if dtype == torch.bfloat16 else "fma.rn.f16x2"
    compile_for_hopper(monkeypatch, f"{EXPERT_KERNELS}.widening._widen", pairs, widen, down, dtype)


def test_a_few_rows_of_four_bit_floats_are_decoded_in_pairs_by_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    up, down = of_gpt_oss(5760), of_gpt_oss(2880)
    compile_for_hopper(monkeypatch, f"{WORD_ROWS}._gate_word_rows", "fma.rn.bf16x2", launch_rows, up, torch.bfloat16)
    compile_for_hopper(monkeypatch, f"{WORD_ROWS}._add_word_rows", "fma.rn.bf16x2", launch_added_rows, down, DTYPE)


def test_a_few_rows_of_eight_bits_are_decoded_by_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    decodes, dtype = "cvt.rn.f16x2.e4m3x2", torch.bfloat16
    compile_for_hopper(monkeypatch, f"{FLOAT_ROWS}._gate_float_rows", decodes, launch_rows, in_blocks(), dtype)
    compile_for_hopper(monkeypatch, f"{FLOAT_ROWS}._add_float_rows", decodes, launch_added_rows, in_blocks(), dtype)
