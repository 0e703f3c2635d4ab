"""`python -m tools.bundled_model.quantize FORMAT DIRECTORY`: the bundled model, or another, in few bits.

Weights are rounded to what is nearest; calibrated ones are better.
"""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BUNDLED = Path(__file__).parents[2] / "penstock" / "bundled_model"
_WEIGHTS = "model.safetensors"
_GROUP, _BITS = 64, 4
_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the output of each place in a word, from its lowest bits on
_FP8 = torch.float8_e4m3fn

Stored = dict[str, Tensor]


def quantize_fp8(weight: Tensor) -> Stored:
    """weight [outputs, inputs] as 8-bit floats with a scale for each output."""
    scale = weight.abs().amax(1, keepdim=True) / torch.finfo(_FP8).max
    return {"weight": (weight / scale).to(_FP8), "weight_scale": scale}


def quantize_awq(weight: Tensor) -> Stored:
    """weight [outputs, inputs] as numbers of 4 bits, with a zero and a scale for each group of inputs."""
    groups = weight.t().reshape(-1, _GROUP, len(weight))  # [groups, inputs of each, outputs]
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    most = 2**_BITS - 1
    scales = ((high - low) / most).half()
    zeros = (-low / scales.float()).round().clamp(0, most)
    numbers = (groups / scales.float().unsqueeze(1)).round() + zeros.unsqueeze(1)
    return {"qweight": _words(numbers.clamp(0, most).flatten(0, 1)), "qzeros": _words(zeros), "scales": scales}


def _words(numbers: Tensor) -> Tensor:
    """[rows, outputs] -> i32[rows, outputs / 8]."""
    placed = numbers.to(torch.int64).reshape(len(numbers), -1, len(_ORDER))[..., _ORDER]
    shifts = torch.arange(0, 32, _BITS)
    return (placed << shifts).sum(-1).to(torch.int32)


_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
FORMATS: dict[str, tuple[Callable[[Tensor], Stored], dict[str, Any]]] = {
    "fp8": (
        quantize_fp8,
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _SCHEME}},
        },
    ),
    "awq": (
        quantize_awq,
        {"quant_method": "awq", "bits": _BITS, "group_size": _GROUP, "version": "gemm", "zero_point": True},
    ),
}


def quantize_checkpoint(format_: str, directory: Path, source: Path = BUNDLED) -> None:
    """Write the checkpoint at `source` into `directory` in a format of `FORMATS`."""
    quantize, described = FORMATS[format_]
    shutil.copytree(source, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(_WEIGHTS))
    stored: Stored = {}
    for name, tensor in load_file(source / _WEIGHTS).items():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj") and layer != name:
            stored |= {f"{layer}.{suffix}": each.contiguous() for suffix, each in quantize(tensor.float()).items()}
        else:
            stored[name] = tensor
    save_file(stored, directory / _WEIGHTS)
    config = json.loads((source / "config.json").read_text("utf-8"))
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": described}, indent=2) + "\n")


def main() -> None:
    """Read the arguments and write the checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m tools.bundled_model.quantize", description=__doc__)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--source", type=Path, default=BUNDLED)
    arguments = parser.parse_args()
    quantize_checkpoint(arguments.format, arguments.directory, arguments.source)


if __name__ == "__main__":
    main()
