"""Checkpoints in each format of weights, and the dense ones that stand for just the same: made by plain arithmetic,
element by element where a format is described so, and by nothing of the worker's.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from quantized_fours import FP8, LARGEST, Stored, mxfp4, nvfp4, of_mxfp4, of_nvfp4
from quantized_integers import awq, gptq, int8, of_awq, of_gptq, of_packed, packed
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
TOKENS = {**FLOAT, "strategy": "token", "dynamic": True}


@dataclass(frozen=True)
class Case:
    """A format: a checkpoint's words for it, the tensors of a weight by suffix, and the weight that these stand for."""

    name: str
    config: dict[str, Any]
    quantize: Callable[[Tensor], Stored]
    stands_for: Callable[[Mapping[str, Tensor]], Tensor]
    # By which logits may differ from those of the dense model: more where inputs are rounded.
    logits_differ: float = 1e-4
    extra: Stored = field(default_factory=dict)  # tensors of a layer that nothing needs


def compressed_tensors(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True, **weights}}
    groups = {"group_0": {**group, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": groups, **more}


def fp8_channel(weight: Tensor) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / LARGEST
    return {"weight": (weight / scale).to(FP8), "weight_scale": scale}


def fp8_tensor(weight: Tensor, scale_name: str = "weight_scale", input_name: str = "input_scale") -> Stored:
    scale = weight.abs().max() / LARGEST
    return {"weight": (weight / scale).to(FP8), scale_name: scale, input_name: torch.tensor(0.5)}


def scaled(stored: Mapping[str, Tensor], scale_name: str = "weight_scale") -> Tensor:
    return stored["weight"].float() * stored[scale_name]


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
    for row, scales in enumerate(stored[suffix]):
        for column, scale in enumerate(scales):
            weight[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns] *= scale
    return weight


def _blocks(name: str, config: dict[str, Any], rows: int, columns: int, suffix: str = "weight_scale_inv") -> Case:
    return Case(
        name,
        config,
        lambda weight: fp8_block(weight, rows, columns, suffix),
        lambda stored: of_blocks(stored, rows, columns, suffix),
    )


def _words(
    name: str, quantize: Callable[..., Stored], stands_for: Callable[..., Tensor], config: dict[str, Any], **how: Any
) -> Case:
    return Case(name, config, lambda weight: quantize(weight, **how), lambda stored: stands_for(stored, **how))


def _fp4_weights(strategy: str, group: int) -> dict[str, Any]:
    return {**FLOAT, "num_bits": 4, "strategy": strategy, "group_size": group}


INT = {"type": "int"}

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
        "fp8_tensor_of_transformers",
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        lambda weight: fp8_tensor(weight, "weight_scale_inv", "activation_scale"),
        lambda stored: scaled(stored, "weight_scale_inv"),
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
        "fp8_block_square",
        {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"},
        16,
        16,
    ),
    _blocks(
        "fp8_block_compressed",
        compressed_tensors({**FLOAT, "strategy": "block", "block_structure": [16, 16]}),
        16,
        16,
        "weight_scale",
    ),
    # Of which kernels for experts take a step at once.
    _blocks("fp8_block_wide", {"quant_method": "fp8", "weight_block_size": [16, 32], "fmt": "e4m3"}, 16, 32),
]
CASES += [
    _words("awq", awq, of_awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}, group=16),
    _words("awq_one_group", awq, of_awq, {"quant_method": "awq", "w_bit": 4, "q_group_size": -1}, group=None),
    *(
        _words(
            f"gptq_{bits}_bits{name}",
            gptq,
            of_gptq,
            {"quant_method": "gptq", "bits": bits, "group_size": -1 if group is None else group, **more},
            group=group,
            bits=bits,
            less=0 if "checkpoint_format" in more else 1,
            order="desc_act" in more,
        )
        for bits, name, group, more in (
            (4, "", 16, {}),
            (8, "", 16, {"lm_head": False, "dynamic": {"-:.*nothing.*": {}}}),
            (4, "_one_group", None, {}),
            (4, "_second_layout", 16, {"checkpoint_format": "gptq_v2"}),
            (4, "_any_order", 16, {"desc_act": True}),
            (8, "_any_order_second_layout", 8, {"desc_act": True, "checkpoint_format": "gptq_v2"}),
        )
    ),
    *(
        _words(
            f"packed_{bits}_bits_{name}",
            packed,
            of_packed,
            compressed_tensors({**INT, "num_bits": bits, **weights}, format="pack-quantized"),
            group=weights.get("group_size"),
            bits=bits,
            order=weights.get("actorder") == "group",
            zeros=not weights.get("symmetric", True),
        )
        for bits, name, weights in (
            (4, "groups", {"strategy": "group", "group_size": 16, "actorder": "weight"}),
            (8, "groups", {"strategy": "group", "group_size": 16}),
            (4, "outputs", {"strategy": "channel"}),
            (4, "zeros", {"strategy": "group", "group_size": 16, "symmetric": False}),
            (8, "zeros_of_outputs", {"strategy": "channel", "symmetric": False}),
            (4, "any_order", {"strategy": "group", "group_size": 16, "actorder": "group"}),
            (4, "any_order_zeros", {"strategy": "group", "group_size": 8, "symmetric": False, "actorder": "group"}),
        )
    ),
    _words(
        "nvfp4",
        nvfp4,
        of_nvfp4,
        compressed_tensors(
            _fp4_weights("tensor_group", 16),
            {**_fp4_weights("tensor_group", 16), "dynamic": "local"},
            format="nvfp4-pack-quantized",
        ),
        names=("weight_packed", "weight_global_scale"),
        divides=True,
    ),
    _words(
        "nvfp4_modelopt",
        nvfp4,
        of_nvfp4,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
        names=("weight", "weight_scale_2"),
        divides=False,
    ),
    Case("mxfp4_packed", compressed_tensors(_fp4_weights("group", 32), format="mxfp4-pack-quantized"), mxfp4, of_mxfp4),
    Case(
        "int8",
        compressed_tensors(
            {**INT, "num_bits": 8, "strategy": "channel"},
            {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
            format="int-quantized",
        ),
        int8,
        scaled,
    ),
]
# Of more inputs than layers of most tests have.
PUBLISHED = _blocks("fp8_block_published", {"quant_method": "fp8", "weight_block_size": [128, 128]}, 128, 128)
PUBLISHED_FOURS = [
    _words(
        "awq_published",
        awq,
        of_awq,
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
        group=128,
    ),
    _words(
        "gptq_published",
        gptq,
        of_gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        group=128,
        bits=4,
        less=1,
        order=False,
    ),
    _words(
        "packed_published",
        packed,
        of_packed,
        compressed_tensors({**INT, "num_bits": 4, "strategy": "group", "group_size": 128}, format="pack-quantized"),
        group=128,
        bits=4,
        order=False,
        zeros=False,
    ),
]
BY_NAME = {case.name: case for case in (*CASES, PUBLISHED, *PUBLISHED_FOURS)}


def round_inputs(model: nn.Module) -> None:
    """Have all layers but the head multiply inputs that are rounded to 8-bit floats, by a scale for each token."""

    def rounded(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        scales = inputs[0].abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
        return ((inputs[0] / scales).to(torch.float8_e4m3fn).float() * scales,)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(rounded)


# As layers that are multiplied with are called, experts' of Mixtral and MiniMax-M2 among them.
_PROJECTIONS = ("proj", "proj_with_mqa", "in_proj_qkvz", "in_proj_ba", ".w1", ".w2", ".w3")


def save_quantized(
    source: Path,
    directory: Path,
    case: Case,
    *,
    dense: Path | None = None,
    config: dict[str, Any] | None = None,
    has_head: bool = False,
    ignored: str | None = None,
) -> None:
    """The checkpoint at `source` with its projections (and its head) quantized, but those whose names end with
    `ignored`; and in `dense`, if that is asked for, with what these stand for.
    """
    fields = json.loads((source / "config.json").read_text())
    stored: Stored = {}
    widened: Stored = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        is_projection = layer.endswith(_PROJECTIONS) or (has_head and layer == "lm_head")
        is_ignored = ignored is not None and layer.endswith(ignored)
        if not is_projection or is_ignored or tensor.ndim != 2 or layer == name:
            stored[name] = widened[name] = tensor
            continue
        pieces = case.quantize(tensor.float())
        if dense is not None:
            widened[name] = case.stands_for(pieces)
        stored |= {f"{layer}.{suffix}": each.contiguous().clone() for suffix, each in (pieces | case.extra).items()}
    if dense is not None:
        _save(dense, widened, fields)
    _save(directory, stored, fields | {"quantization_config": case.config if config is None else config})


def save_mxfp4(source: Path, directory: Path) -> None:
    """A gpt-oss with experts of random 4-bit floats, as OpenAI stores them."""
    fields = json.loads((source / "config.json").read_text())
    stored: Stored = {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, inputs, outputs = tensor.shape
            shape = count, outputs, inputs // 32
            stored[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
        else:
            stored[name] = tensor
    dense = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": dense}
    _save(directory, stored, fields)


def _save(directory: Path, stored: Stored, fields: dict[str, Any]) -> None:
    directory.mkdir(exist_ok=True)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(fields))
