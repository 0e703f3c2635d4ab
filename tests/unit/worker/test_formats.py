"""Formats: what is stored, cut and merged by what the dimensions count; eight-bit floats against the dense weights."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import Drive, drive
from safetensors.torch import load_file, save_file
from tiny_models import FIELDS, save_model
from torch import Tensor

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import Sampling
from worker_svc.core.distributed import Group
from worker_svc.core.formats.choice import find_format
from worker_svc.core.formats.fp8_channel import Fp8Channel, Fp8ChannelFormat
from worker_svc.core.formats.interface import IN, Dim, Piece, cut_unit
from worker_svc.core.layers.linear import Linear, Projection
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.quantization import Fp8ChannelSpec, QuantizationSpec, parse_quantization
from worker_svc.core.models.spec import StoredRows
from worker_svc.factory import load_runner
from worker_svc.runner_options import RunnerOptions
from worker_svc.weights import load_weights

FP8 = torch.float8_e4m3fn
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True}
WEIGHTS = {**SCHEME, "strategy": "channel", "dynamic": False}
TOKENS = {**SCHEME, "strategy": "token", "dynamic": True}


def described(**group: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, **group}},
    }


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """As compressed-tensors does: a scale for each output."""
    scale = weight.abs().amax(1, keepdim=True) / torch.finfo(FP8).max
    return (weight / scale).to(FP8), scale


def test_a_dimension_says_where_what_it_counts_is_stored() -> None:
    piece = Piece("qweight", (IN, Dim("out", 8)))
    assert piece.shape(64, 20) == (20, 8)
    assert piece.index(slice(16, 48), slice(5, 10)) == (slice(5, 10), slice(2, 6))
    with pytest.raises(PenstockError, match="within a group of 8"):
        piece.index(slice(4, 48), slice(0, 20))
    assert cut_unit(Fp8ChannelFormat(Fp8ChannelSpec(rounds_inputs=True)), "in") == 1


@pytest.mark.parametrize(("size", "unit", "world_size"), [(96, 32, 2), (10, 1, 3), (7, 4, 4), (64, 16, 4)])
def test_ranks_cut_between_groups_and_have_all_together(size: int, unit: int, world_size: int) -> None:
    parts = [
        Placement(torch.device("meta"), torch.float32, Group(rank, world_size)).columns(size, unit)
        for rank in range(world_size)
    ]
    assert [number for part in parts for number in range(part.start, part.stop)] == list(range(size))
    assert all(part.start % unit == 0 or part.start == size for part in parts)
    lengths = [-(-(part.stop - part.start) // unit) for part in parts]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("rounds_inputs", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_eight_bit_layers_are_read_and_merged_and_cut_as_dense_ones(
    tmp_path: Path, world_size: int, *, rounds_inputs: bool
) -> None:
    """Two projections of one stored tensor, and a third beside them; then split by inputs."""
    torch.manual_seed(3)
    both, third = torch.randn(28, 16), torch.randn(10, 16)
    tensors: dict[str, Tensor] = {}
    for name, weight in {"both": both, "third": third}.items():
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = quantize(weight)
    save_file(tensors, tmp_path / "model.safetensors")
    whole = {name: tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"] for name in ("both", "third")}
    x, found = torch.randn(5, 16), []
    for rank in range(world_size):
        placement = Placement(
            torch.device("cpu"),
            torch.float32,
            Group(rank, world_size),
            quantization=QuantizationSpec(Fp8ChannelSpec(rounds_inputs=rounds_inputs)),
        )
        rows, others = placement.columns(14), placement.columns(10)
        projections = [
            Projection(StoredRows("both", 14, 28), 14, rows),
            Projection(StoredRows("third"), 10, others),
        ]
        linear = Linear(placement, projections, 16)
        load_weights(tmp_path, placement.wanted)
        assert isinstance(linear.packed, Fp8Channel)
        found.append(linear.multiply(x).split(linear.sizes, dim=-1))
    got = torch.cat([torch.cat(parts, -1) for parts in zip(*found, strict=True)], -1)
    expected = x @ torch.cat((whole["both"][14:], whole["third"])).t()
    torch.testing.assert_close(got, expected, atol=0.25 if rounds_inputs else 1e-5, rtol=0.0)


def test_each_token_is_rounded_by_itself() -> None:
    """So that what a token becomes does not depend on the batch."""
    torch.manual_seed(4)
    weight, scales = quantize(torch.randn(8, 16))
    packed = Fp8Channel(weight, scales, rounds_inputs=True)
    x = torch.randn(6, 16) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 2.0, 7.0])[:, None]
    together = packed.multiply(x, None)
    alone = torch.cat([packed.multiply(row[None], None) for row in x])
    torch.testing.assert_close(together, alone)
    assert together[3].count_nonzero() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_eight_bit_products_of_a_gpu_are_those_of_the_formula(rows: int) -> None:
    torch.manual_seed(5)
    weight, scales = quantize(torch.randn(48, 64))
    x, bias = torch.randn(rows, 64).bfloat16(), torch.randn(48).bfloat16()
    expected = Fp8Channel(weight, scales, rounds_inputs=True).multiply(x.float(), bias.float())
    on_gpu = Fp8Channel(weight.cuda(), scales.cuda(), rounds_inputs=True)
    found = on_gpu.multiply(x.cuda(), bias.cuda())
    errors = (found.cpu().float() - expected).abs()
    # A number of a token that lies between two of 8 bits may become either: an output is off by an eighth of a product.
    assert float((errors > 0.1).float().mean()) < 0.01
    assert float(errors.max()) < 0.8
    alone = torch.cat([on_gpu.multiply(row[None], bias.cuda()) for row in x.cuda()])
    torch.testing.assert_close(found, alone, atol=0.05, rtol=0.02)


def save_quantized(directory: Path, *, is_dense: bool, inputs: dict[str, Any] | None = None) -> None:
    """The tiny model with 8-bit linear layers, or the dense model that has just the same weights."""
    save_model(directory)
    tensors, stored = load_file(directory / "model.safetensors"), {}
    for name, weight in tensors.items():
        if name.endswith("proj.weight"):
            rounded, scale = quantize(weight)
            if is_dense:
                stored[name] = rounded.float() * scale
            else:
                stored |= {name: rounded, f"{name}_scale": scale}
        else:
            stored[name] = weight
    save_file(stored, directory / "model.safetensors")
    if not is_dense:
        fields = {**FIELDS, "quantization_config": described(input_activations=inputs)}
        (directory / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("inputs", [None, TOKENS])
def test_a_quantized_checkpoint_is_loaded_by_its_configuration(tmp_path: Path, inputs: dict[str, Any] | None) -> None:
    runs = []
    for is_dense in (True, False):
        directory = tmp_path / str(is_dense)
        directory.mkdir()
        save_quantized(directory, is_dense=is_dense, inputs=inputs)
        options = RunnerOptions(str(directory), device="cpu", num_blocks=20, max_model_len=32)
        loaded = load_runner(options, time.monotonic_ns)
        runs.append(Drive([5, 9, 11, 40, 3], 1, Sampling(temperature=0.0, num_logprobs=90)))
        drive(loaded.runner, runs[-1:])
        loaded.close()
    dense, quantized = (run.tops[0] for run in runs)
    assert dense.keys() & quantized.keys()
    difference = max(abs(quantized[token_id] - dense[token_id]) for token_id in dense.keys() & quantized.keys())
    assert difference < 1e-4 if inputs is None else 1e-4 < difference < 0.5


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"quantization \(gptq\)"),
        (described(weights={**WEIGHTS, "strategy": "block"}), r"weights\.strategy is 'block'"),
        (described(weights={**WEIGHTS, "num_bits": 4}), r"weights\.num_bits is 4"),
        (described(weights={**WEIGHTS, "type": "int"}), r"weights\.type is 'int'"),
        (described(input_activations={**TOKENS, "dynamic": False}), r"input_activations\.dynamic is False"),
        ({**described(), "kv_cache_scheme": SCHEME}, "kv_cache_scheme"),
        ({**described(), "config_groups": {}}, "0 config_groups"),
        (described(targets=["re:.*experts.*"]), "targets"),
    ],
)
def test_a_format_that_is_not_there_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(PenstockError, match=named) as caught:
        parse_quantization(config)
    assert caught.value.code is ErrorCode.UNIMPLEMENTED


def test_layers_that_are_ignored_are_dense() -> None:
    quantization = parse_quantization({**described(), "ignore": ["lm_head", "re:.*down_proj"]})
    names = {name: type(find_format(quantization, name)).__name__ for name in ("lm_head", "a.down_proj", "a.up_proj")}
    assert names == {"lm_head": "DenseFormat", "a.down_proj": "DenseFormat", "a.up_proj": "Fp8ChannelFormat"}


def test_eight_bits_that_the_configuration_does_not_mean_are_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, is_dense=False)
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    with pytest.raises(PenstockError, match=r"quantization_config|a tensor that the model does not have"):
        load_runner(RunnerOptions(str(tmp_path), device="cpu", num_blocks=20), time.monotonic_ns)
