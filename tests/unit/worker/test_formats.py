"""Formats: what is stored, cut and merged by what the dimensions count; eight-bit floats against the dense weights."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import Drive, drive
from quantized import BY_NAME, CASES, FLOAT, Case, compressed_tensors, fp8_channel, save_quantized
from safetensors.torch import save_file
from tiny_models import FIELDS, save_model
from torch import Tensor

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import Sampling
from worker_svc.core.distributed import Group
from worker_svc.core.formats.choice import find_reading
from worker_svc.core.formats.dense import DenseFormat
from worker_svc.core.formats.fp8_channel import Fp8Channel, Fp8ChannelFormat
from worker_svc.core.formats.fp8_groups import Fp8Groups
from worker_svc.core.formats.int4 import Int4
from worker_svc.core.formats.interface import IN, Dim, Format, Piece, Reading
from worker_svc.core.layers.linear import Linear, Projection
from worker_svc.core.layers.placement import Placement
from worker_svc.core.models.spec import StoredRows
from worker_svc.core.operations.torch_operations import TorchOperations
from worker_svc.core.quantization.choice import choose_quantization, parse_quantization
from worker_svc.core.quantization.spec import Fp8OnlineSpec, QuantizationSpec
from worker_svc.factory import load_runner
from worker_svc.runner_options import RunnerOptions
from worker_svc.weights import load_weights


def test_a_dimension_says_where_what_it_counts_is_stored() -> None:
    piece = Piece("qweight", (IN, Dim("out", 8)))
    assert piece.shape(64, 20) == (20, 8)
    assert piece.index(slice(16, 48), slice(5, 10)) == (slice(5, 10), slice(2, 6))
    assert Reading((piece,), DenseFormat()).stored_part("out", slice(4, 30), 60) == slice(0, 32)
    assert Reading((piece,), DenseFormat()).stored_part("out", slice(4, 60), 60) == slice(0, 60)
    assert Reading((piece,), DenseFormat()).stored_part("in", slice(3, 7), 20) == slice(3, 7)


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


class AllForms(TorchOperations):
    """Multiply every form that there is, of any size."""

    def multiplies(self, form: Format, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
        return True


UNITS = {
    "fp8_block": 20,
    "fp8_block_square": 16,
    "fp8_block_compressed": 16,
    "fp8_block_wide": 32,
}
BLOCKS = [BY_NAME[name] for name in UNITS]
INT4 = [case for case in CASES if case.name.startswith(("awq", "gptq_4", "packed_4")) and "any_order" not in case.name]


@pytest.mark.parametrize(
    ("case", "operations"),
    [*((case, TorchOperations()) for case in CASES), *((case, AllForms()) for case in (*INT4, *BLOCKS))],
    ids=lambda each: each.name if isinstance(each, Case) else type(each).__name__,
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_quantized_layers_are_read_and_merged_and_cut_as_dense_ones(
    tmp_path: Path, world_size: int, case: Case, operations: TorchOperations
) -> None:
    """Two projections of one stored tensor, and a third beside them, dense; then split by inputs."""
    torch.manual_seed(3)
    weights = {"both": torch.randn(48, 64), "third": torch.randn(40, 64) * 3, "down": torch.randn(24, 128)}
    tensors: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for name, weight in weights.items():
        stored = case.quantize(weight)
        whole[name] = case.stands_for(stored)
        tensors |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    quantization = parse_quantization(case.config)
    x, found, sums = torch.randn(5, 64), [], []
    down_x = torch.randn(5, 128)
    for rank in range(world_size):
        group = Group(rank, world_size)
        placement = Placement(torch.device("cpu"), torch.float32, group, operations, quantization)
        rows, others, columns = placement.columns(24, 8), placement.columns(40, 8), placement.columns(128, 16)
        projections = [Projection(StoredRows("both", 24, 48), 24, rows), Projection(StoredRows("third"), 40, others)]
        linear = Linear(placement, projections, 64)
        down = Linear(placement, [Projection(StoredRows("down"), 24, slice(0, 24))], 128, columns)
        load_weights(tmp_path, placement.wanted, placement.conversions, unused_suffixes=quantization.unused)
        kept = Fp8Groups if case in BLOCKS else Int4
        is_kept, unit = isinstance(operations, AllForms), UNITS.get(case.name, 128)
        assert isinstance(linear.packed, kept) == is_kept
        shares = columns.start % unit or (columns.stop % unit and columns.stop < 128)
        assert isinstance(down.packed, kept) == (is_kept and not shares)
        found.append(linear.multiply(x).split(linear.sizes, dim=-1))
        sums.append(down.packed.multiply(down_x[:, columns], None))
    got = torch.cat([torch.cat(parts, -1) for parts in zip(*found, strict=True)], -1)
    expected = x @ torch.cat((whole["both"][24:], whole["third"])).t()
    near = 0.05 if case.logits_differ > 1e-4 else 1e-6
    for one, other in ((got, expected), (sum(sums), down_x @ whole["down"].t())):
        torch.testing.assert_close(one, other, atol=near * float(other.abs().max()), rtol=0.0)


@pytest.mark.parametrize("case", INT4, ids=lambda case: case.name)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_keep_integers_of_4_bits_that_they_cut_between_blocks(
    tmp_path: Path, world_size: int, case: Case
) -> None:
    torch.manual_seed(3)
    stored = case.quantize(torch.randn(16, 400))
    save_file({f"down.{suffix}": each.contiguous() for suffix, each in stored.items()}, tmp_path / "model.safetensors")
    x, total = torch.randn(5, 400), torch.zeros(5, 16)
    for rank in range(world_size):
        group, quantization = Group(rank, world_size), parse_quantization(case.config)
        placement = Placement(torch.device("cpu"), torch.float32, group, AllForms(), quantization)
        columns = placement.columns(400, 128)
        down = Linear(placement, [Projection(StoredRows("down"), 16, slice(0, 16))], 400, columns)
        load_weights(tmp_path, placement.wanted, placement.conversions, unused_suffixes=quantization.unused)
        assert isinstance(down.packed, Int4)
        total += down.packed.multiply(x[:, columns], None)
    torch.testing.assert_close(total, x @ case.stands_for(stored).t(), atol=1e-3, rtol=0)


def test_groups_that_ranks_share_are_widened() -> None:
    quantization = parse_quantization({"quant_method": "awq", "bits": 4, "group_size": 256, "version": "gemm"})
    for columns, is_kept in ((slice(0, 256), True), (slice(256, 384), True), (slice(0, 128), False)):
        placement = Placement(torch.device("meta"), torch.float32, Group(0, 2), AllForms(), quantization)
        down = Linear(placement, [Projection(StoredRows("down"), 16, slice(0, 16))], 384, columns)
        assert isinstance(down.packed, Int4) == is_kept


def test_each_token_is_rounded_by_itself() -> None:
    """So that what a token becomes does not depend on the batch."""
    torch.manual_seed(4)
    weight, scales = fp8_channel(torch.randn(8, 16)).values()
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
    weight, scales = fp8_channel(torch.randn(48, 64)).values()
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


def first_logits(directory: Path, **options: Any) -> dict[int, float]:
    loaded = load_runner(
        RunnerOptions(str(directory), device="cpu", num_blocks=20, max_model_len=32, **options), time.monotonic_ns
    )
    run = Drive([5, 9, 11, 40, 3], 1, Sampling(temperature=0.0, num_logprobs=90))
    drive(loaded.runner, [run])
    loaded.close()
    return run.tops[0]


def difference(one: dict[int, float], other: dict[int, float]) -> float:
    both = one.keys() & other.keys()
    assert both
    return max(abs(one[token_id] - other[token_id]) for token_id in both)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_quantized_checkpoint_is_loaded_by_its_configuration(tmp_path: Path, case: Case) -> None:
    save_model(tmp_path)
    save_quantized(tmp_path, tmp_path / "stored", case, dense=tmp_path / "dense")
    dense, quantized = (first_logits(tmp_path / name) for name in ("dense", "stored"))
    far = difference(dense, quantized)
    assert far < case.logits_differ
    assert far > 1e-4 or case.logits_differ <= 1e-4  # inputs are rounded


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes"}, r"quantization \(bitsandbytes; there are: "),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"\(fp8\) whose fmt is 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"blocks of \[128\]"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, r"\(modelopt\) whose quant_algo is 'NVFP4_AWQ'"),
        ({"quant_method": "gptq"}, r"\(gptq\) whose bits is None"),
        ({"quant_method": "gptq", "bits": 3}, r"\(gptq\) whose bits is 3 and not 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*up.*": {"bits": 8}}}, r"other bits for \+:\.\*up"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"\(awq\) whose version is 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point is False"),
        (compressed_tensors({"type": "int", "num_bits": 4}, format="marlin-24"), "stored as 'marlin-24'"),
        (
            compressed_tensors({**FLOAT, "num_bits": 4}, format="float-quantized"),
            "num_bits is 4, stored as 'float-quantized'",
        ),
        (compressed_tensors({"type": "int", "num_bits": 3}, format="pack-quantized"), r"weights\.num_bits is 3"),
        (compressed_tensors({**FLOAT, "strategy": "group"}), r"weights\.strategy is 'group'"),
        (compressed_tensors({**FLOAT, "num_bits": 4, "strategy": "tensor_group"}), r"weights\.num_bits is 4"),
        (compressed_tensors({**FLOAT, "strategy": "channel", "dynamic": True}), r"weights\.dynamic is True"),
        (compressed_tensors({**FLOAT, "strategy": "channel"}, {"num_bits": 4}), r"input_activations\.num_bits is 4"),
        ({**compressed_tensors(FLOAT), "config_groups": {}}, "0 config_groups"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"0": {"targets": ["re:.*experts.*"]}}},
            "targets",
        ),
    ],
)
def test_a_format_that_is_not_there_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(PenstockError, match=named) as caught:
        parse_quantization(config)
    assert caught.value.code is ErrorCode.UNIMPLEMENTED


def covered(config: dict[str, Any], *names: str) -> list[bool]:
    quantization = parse_quantization(config)
    return [quantization.covers(name) for name in names]


def test_layers_that_are_ignored_are_dense() -> None:
    config = {**compressed_tensors({**FLOAT, "strategy": "channel"}), "ignore": ["lm_head", "re:.*down_proj"]}
    assert covered(config, "lm_head", "a.down_proj", "a.up_proj") == [False, False, True]
    quantization = parse_quantization(config)
    assert isinstance(find_reading(quantization, "a.down_proj").multiplied, DenseFormat)
    assert isinstance(find_reading(quantization, "a.up_proj").multiplied, Fp8ChannelFormat)


def test_lists_of_layers_name_whole_words_of_names() -> None:
    listed = ["mlp.gate", "model.layers.1", "model.layers.2.*.up_proj"]
    config = {"quant_method": "fp8", "modules_to_not_convert": listed}
    names = ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", "model.layers.1.mlp.up_proj")
    assert covered(config, *names, "model.layers.10.mlp.up_proj") == [False, True, False, True]
    others = ("model.layers.2.mlp.up_proj", "model.layers.2.mlp.down_proj", "lm_head")
    assert covered(config, *others) == [False, True, False]


def test_a_list_of_dense_layers_that_is_none_is_refused() -> None:
    with pytest.raises(PenstockError, match="list of layers"):
        parse_quantization({"quant_method": "fp8", "modules_to_not_convert": "lm_head"})


def test_eight_bits_that_the_configuration_does_not_mean_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path)
    save_quantized(tmp_path, tmp_path, BY_NAME["fp8_channel"])
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    with pytest.raises(PenstockError, match=r"quantization_config|a tensor that the model does not have"):
        load_runner(RunnerOptions(str(tmp_path), device="cpu", num_blocks=20), time.monotonic_ns)


def test_lists_say_which_layers_of_a_block_are_quantized() -> None:
    config = {"quant_method": "gptq", "bits": 4, "dynamic": {r"-:.*layers\.3\..*": {}}}
    listed = [["self_attn.k_proj", "self_attn.v_proj"], ["mlp.up_proj"]]
    names = ("model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.o_proj", "model.layers.3.mlp.up_proj")
    assert covered({**config, "modules_in_block_to_quantize": listed}, *names) == [True, False, False]
    assert covered(config, *names, "lm_head") == [True, True, False, False]
    assert covered({**config, "lm_head": True}, "lm_head") == [True]


@pytest.mark.parametrize(
    ("format_", "name", "beside"),
    [
        ("gptq_8_bits", "quantize_config.json", {"bits": 8, "group_size": 16, "desc_act": False, "sym": True}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 16, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_files_of_those_who_quantize_are_read_where_the_configuration_does_not_say_it(
    tmp_path: Path, format_: str, name: str, beside: dict[str, Any]
) -> None:
    save_model(tmp_path)
    save_quantized(tmp_path, tmp_path / "quantized", BY_NAME[format_])
    expected = first_logits(tmp_path / "quantized")
    (tmp_path / "quantized" / "config.json").write_text(json.dumps(FIELDS))
    (tmp_path / "quantized" / name).write_text(json.dumps(beside))
    assert first_logits(tmp_path / "quantized") == expected


def test_a_file_of_modelopt_beside_the_configuration_is_read(tmp_path: Path) -> None:
    save_model(tmp_path)
    case = BY_NAME["fp8_tensor_modelopt"]
    save_quantized(tmp_path, tmp_path / "quantized", case)
    expected = first_logits(tmp_path / "quantized")
    (tmp_path / "quantized" / "config.json").write_text(json.dumps(FIELDS))
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "quantized" / "hf_quant_config.json").write_text(json.dumps(beside))
    assert first_logits(tmp_path / "quantized") == expected


def test_scales_of_keys_and_values_are_left_out_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_model(tmp_path)
    config = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
    case = replace(BY_NAME["fp8_tensor_static"], extra={"k_scale": torch.tensor(0.1), "v_scale": torch.tensor(0.2)})
    save_quantized(tmp_path, tmp_path / "quantized", case, config=config)
    save_quantized(tmp_path, tmp_path / "without", BY_NAME["fp8_tensor_static"])
    assert first_logits(tmp_path / "quantized") == first_logits(tmp_path / "without")
    assert "scales of keys and values are not used" in caplog.text


def test_weights_that_nothing_multiplies_are_widened_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    save_model(tmp_path)
    save_quantized(tmp_path, tmp_path / "quantized", BY_NAME["fp8_block"])
    first_logits(tmp_path / "quantized")
    (record,) = (each for each in caplog.records if each.message == "weights widened")
    assert (record.__dict__["quantization"], record.__dict__["to"]) == ("fp8", "float32")


def test_a_dense_checkpoint_is_rounded_to_eight_bits_when_it_is_read(tmp_path: Path) -> None:
    save_model(tmp_path)
    case = BY_NAME["fp8_tokens"]
    save_quantized(tmp_path, tmp_path / "quantized", case)
    dense, online = first_logits(tmp_path), first_logits(tmp_path, quantization="fp8")
    assert difference(online, first_logits(tmp_path / "quantized")) < 1e-4
    assert difference(online, dense) > 1e-3


def test_workers_that_round_a_dense_checkpoint_are_told_from_those_that_do_not(tmp_path: Path) -> None:
    save_model(tmp_path)
    found = []
    for quantization in (None, "fp8"):
        options = RunnerOptions(str(tmp_path), device="cpu", num_blocks=20, max_model_len=32, quantization=quantization)
        loaded = load_runner(options, time.monotonic_ns)
        found.append((loaded.precision, loaded.profile.weights_bytes))
        loaded.close()
    assert [precision for precision, _ in found] == ["torch.float32", "torch.float32 fp8"]
    assert found[1][1] < 0.6 * found[0][1]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_round_rows_with_the_scales_of_one(tmp_path: Path, world_size: int) -> None:
    torch.manual_seed(6)
    save_file({"down.weight": torch.randn(6, 32)}, tmp_path / "model.safetensors")
    x, found = torch.randn(4, 32), []
    for ranks in (1, world_size):
        total = torch.zeros(4, 6)
        for rank in range(ranks):
            spec = QuantizationSpec(Fp8OnlineSpec(rounds_inputs=False))
            placement = Placement(torch.device("cpu"), torch.float32, Group(rank, ranks), quantization=spec)
            columns = placement.columns(32)
            down = Linear(placement, [Projection(StoredRows("down"), 6, slice(0, 6))], 32, columns)
            load_weights(tmp_path, placement.wanted, placement.conversions)
            total += down.packed.multiply(x[:, columns], None)
        found.append(total)
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=0)


def test_what_an_option_asks_of_a_checkpoint_that_has_another_is_refused() -> None:
    stored = parse_quantization({"quant_method": "modelopt", "quant_algo": "FP8"})
    assert choose_quantization(stored, "modelopt") is stored
    assert choose_quantization(stored, None) is stored
    with pytest.raises(PenstockError, match="quantized already") as caught:
        choose_quantization(stored, "fp8")
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    with pytest.raises(PenstockError, match=r"quantization \(awq\)"):
        choose_quantization(None, "awq")
