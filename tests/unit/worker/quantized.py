"""Checkpoints in each format of weights, and the dense ones that stand for just the same: made by plain arithmetic,
element by element where a format is described so, and by nothing of the worker's.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
TOKENS = {**FLOAT, "strategy": "token", "dynamic": True}

Stored = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A format: a checkpoint's words for it, the tensors of a weight by suffix, and the weight that these stand for."""

    name: str
    config: dict[str, Any]
    quantize: Callable[[Tensor], Stored]
    stands_for: Callable[[Mapping[str, Tensor]], Tensor]
    logits_differ: float = (
        1e-4  # by which logits may differ from those of the dense model: more where inputs are rounded
    )
    extra: Stored = field(default_factory=dict)  # tensors of a layer that nothing needs


def compressed_tensors(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True, **weights}}
    groups = {"group_0": {**group, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": groups, **more}


def fp8_channel(weight: Tensor) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / LARGEST
    return {"weight": (weight / scale).to(FP8), "weight_scale": scale}


def fp8_tensor(weight: Tensor) -> Stored:
    scale = weight.abs().max() / LARGEST
    return {"weight": (weight / scale).to(FP8), "weight_scale": scale, "input_scale": torch.tensor(0.5)}


def scaled(stored: Mapping[str, Tensor]) -> Tensor:
    return stored["weight"].float() * stored["weight_scale"]


def fp8_block(weight: Tensor, rows: int, columns: int, suffix: str) -> Stored:
    whole = torch.empty_like(weight, dtype=FP8)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
            scales[row, column] = weight[place].abs().max() / LARGEST
            whole[place] = (weight[place] / scales[row, column]).to(FP8)
    return {"weight": whole, suffix: scales}


def of_blocks(stored: Mapping[str, Tensor], rows: int, columns: int, suffix: str) -> Tensor:
    weight = stored["weight"].float()
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            weight[row, column] *= stored[suffix][row // rows, column // columns]
    return weight


def _blocks(name: str, config: dict[str, Any], rows: int, columns: int, suffix: str = "weight_scale_inv") -> Case:
    return Case(
        name,
        config,
        lambda weight: fp8_block(weight, rows, columns, suffix),
        lambda stored: of_blocks(stored, rows, columns, suffix),
    )


CASES = [
    Case("fp8_channel", compressed_tensors({**FLOAT, "strategy": "channel"}), fp8_channel, scaled),
    Case("fp8_tokens", compressed_tensors({**FLOAT, "strategy": "channel"}, TOKENS), fp8_channel, scaled, 0.5),
    Case("fp8_tensor_weights", compressed_tensors({**FLOAT, "strategy": "tensor"}), fp8_tensor, scaled),
    Case(
        "fp8_tensor_static",
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        fp8_tensor,
        scaled,
        0.5,
    ),
    Case(
        "fp8_tensor_modelopt",
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        fp8_tensor,
        scaled,
        0.5,
    ),
    # Blocks that neither heads nor ranks respect.
    _blocks("fp8_block", {"quant_method": "fp8", "weight_block_size": [12, 20], "fmt": "e4m3"}, 12, 20),
    _blocks(
        "fp8_block_compressed",
        compressed_tensors({**FLOAT, "strategy": "block", "block_structure": [16, 16]}),
        16,
        16,
        "weight_scale",
    ),
]
BY_NAME = {case.name: case for case in CASES}


def save_quantized(
    source: Path, directory: Path, case: Case, *, is_dense: bool = False, config: dict[str, Any] | None = None
) -> None:
    """The checkpoint at `source` with its projections quantized; or dense with the weights that these stand for."""
    fields = json.loads((source / "config.json").read_text())
    stored: Stored = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if not layer.endswith("proj") or tensor.ndim != 2 or layer == name:
            stored[name] = tensor
            continue
        pieces = case.quantize(tensor.float())
        if is_dense:
            stored[name] = case.stands_for(pieces)
        else:
            stored |= {f"{layer}.{suffix}": each.contiguous().clone() for suffix, each in (pieces | case.extra).items()}
    if not is_dense:
        fields["quantization_config"] = case.config if config is None else config
    directory.mkdir(exist_ok=True)
    save_file(stored, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(fields))
