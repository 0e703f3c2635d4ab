"""Weights as compressed-tensors stores them, what it says of them, and what it makes of them again.

Writes `{name}.json`, a `quantization_config`, `{name}.stored.safetensors` and `{name}.safetensors` of each scheme into
the folder that is its argument.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file
from torch import Tensor

GROUP = {"strategy": "group", "group_size": 32}
TOKENS = {"strategy": "token", "dynamic": True}
# The format, weights and inputs.
SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "w4a16": ("pack-quantized", {"num_bits": 4, **GROUP}, None),
    "w4a16_asymmetric": ("pack-quantized", {"num_bits": 4, "symmetric": False, **GROUP}, None),
    "w8a16": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}, None),
    "w8a8_int": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, **TOKENS}),
    "fp8_dynamic": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"num_bits": 8, "type": "float", **TOKENS},
    ),
    "fp8_tensor": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
    ),
    "fp8_block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
        None,
    ),
    "nvfp4a16": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": "float8_e4m3fn"},
        None,
    ),
    "mxfp4a16": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", **GROUP, "scale_dtype": "uint8"},
        None,
    ),
}


def parts(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """The least and the greatest of each part that has a scale."""
    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy in ("group", "tensor_group"):
        groups = weight.unflatten(1, (-1, args.group_size))
        return groups.amin(-1), groups.amax(-1)
    rows, columns = args.block_structure
    blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def main(folder: Path) -> None:
    for number, (name, (stored_as, weights, inputs)) in enumerate(SCHEMES.items()):
        args = QuantizationArgs(**weights)
        scheme = QuantizationScheme(
            targets=["Linear"],
            weights=args,
            input_activations=QuantizationArgs(**inputs) if inputs is not None else None,
            format=stored_as,
        )
        weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(number))
        of_all = generate_gparam(weight.min(), weight.max()) if args.strategy == "tensor_group" else None
        scale, zero_point = calculate_qparams(*parts(weight, args), args, global_scale=of_all)
        compressor = BaseCompressor.get_value_from_registry(stored_as)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
        if of_all is not None:
            state["weight_global_scale"] = of_all
        stored = compressor.compress(state, scheme)
        again = compressor.decompress(stored, scheme)["weight"]
        config = QuantizationConfig(config_groups={"group_0": scheme}, format=stored_as, ignore=["lm_head"])
        (folder / f"{name}.json").write_text(json.dumps(config.model_dump(mode="json")))
        named = {f"layer.{suffix}": tensor.contiguous() for suffix, tensor in stored.items() if tensor is not None}
        save_file(named, folder / f"{name}.stored.safetensors")
        save_file({"weight": again.float().contiguous()}, folder / f"{name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
