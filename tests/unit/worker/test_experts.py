"""Mixtures of experts as values and as weights: what counts for what, what ranks have, what is refused."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
import torch
from quantized import BY_NAME, CASES, PUBLISHED_FOURS, Case
from safetensors.torch import save_file
from torch import Tensor

from contract.domain.errors import ErrorCode, PenstockError
from worker_svc import weights
from worker_svc.core.causal_lm import CausalLM
from worker_svc.core.config import ModelConfig, parse_config
from worker_svc.core.distributed import Group
from worker_svc.core.formats.awq import AwqFormat
from worker_svc.core.formats.interface import Tensors
from worker_svc.core.formats.stacked.choice import FLOATS_ALONE, find_stacked_reading, kernel_forms
from worker_svc.core.formats.stacked.floats import StackedFloats, StackedFloatsFormat
from worker_svc.core.formats.stacked.fp4 import StackedFp4Format, pack_fp4
from worker_svc.core.formats.stacked.fp8 import StackedFp8, StackedFp8Format
from worker_svc.core.formats.stacked.int4 import StackedInt4, StackedInt4Format, pack_int4
from worker_svc.core.formats.stacked.interface import StackedFormat
from worker_svc.core.kernels.linear.product import Product
from worker_svc.core.layers.experts import Router
from worker_svc.core.layers.linear import Projection
from worker_svc.core.layers.placement import Conversion, Placement, convert_together
from worker_svc.core.layers.stacked import StackedLinear, inputs_together
from worker_svc.core.models.spec import ExpertsSpec, GatedMLPSpec, RouterSpec, StoredRows
from worker_svc.core.operations.torch_operations import TorchOperations
from worker_svc.core.quantization.choice import parse_quantization
from worker_svc.core.quantization.spec import (
    AwqSpec,
    FormatSpec,
    Fp8BlockSpec,
    Fp8ChannelSpec,
    Fp8OnlineSpec,
    Fp8TensorSpec,
    GptqSpec,
    IntSpec,
    Mxfp4Spec,
    QuantizationSpec,
)
from worker_svc.products import model_products
from worker_svc.weights import load_weights

Layout: TypeAlias = Literal["single", "stacked", "transposed"]
QWEN: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts": 10,
    "num_experts_per_tok": 3,
    "mlp_only_layers": [1],
}
GLM: dict[str, Any] = {
    **{name: value for name, value in QWEN.items() if name not in ("num_experts", "mlp_only_layers")},
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 8,
    "num_nextn_predict_layers": 1,
}
del GLM["shared_expert_intermediate_size"]
GPT: dict[str, Any] = {
    **{name: value for name, value in QWEN.items() if name not in ("num_experts", "mlp_only_layers")},
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 8,
    "sliding_window": 16,
}
del GPT["shared_expert_intermediate_size"], GPT["moe_intermediate_size"]


def parse(fields: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_config({**fields, **changes}, "config.json")


def test_a_token_is_multiplied_with_the_chosen_experts_and_all_are_read() -> None:
    config = parse(QWEN)
    attention = 2 * 2 * (4 + 2) * 8 * 32  # of two layers
    assert config.decoder.num_layer_weights == attention + (10 + 3 * 3 * 48 + 3 * 80 + 3 * 96) * 32
    placement = Placement(torch.device("meta"), torch.bfloat16)
    CausalLM(config.decoder, placement, max_model_len=16)
    experts = sum(each.destination.numel() for each in placement.wanted if ".mlp.experts." in each.name)
    assert experts == 10 * 3 * 48 * 32


def test_products_of_tables_are_those_of_blocks_that_all_tokens_go_through() -> None:
    products = model_products(parse(QWEN), Placement(torch.device("meta"), torch.bfloat16))
    assert {each.outputs for each in products if each.kind == "gated"} == {2 * 80, 2 * 96}
    assert Product("added", 32, 80) in products
    assert all(each.inputs != 48 for each in products)


def test_layers_of_each_kind_are_compiled() -> None:
    config = parse(QWEN, num_hidden_layers=4)
    model = CausalLM(config.decoder, Placement(torch.device("meta"), torch.float32), max_model_len=16)
    assert len(model.outline()._layers) == 3  # of experts, dense, and the last


@pytest.mark.parametrize(
    ("fields", "changes", "field"),
    [
        (QWEN, {"num_experts_per_tok": 11}, "num_experts_per_tok"),
        (QWEN, {"mlp_only_layers": 1}, "mlp_only_layers"),
        (QWEN, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (QWEN, {"num_experts": None}, "num_experts"),
        (GLM, {"n_group": 3}, "n_group"),
        (GLM, {"n_group": 8}, "n_group"),
        (GLM, {"n_group": 2, "topk_group": 3}, "topk_group"),
        (GLM, {"n_group": 4, "topk_group": 1}, "topk_group"),
    ],
)
def test_a_broken_file_names_the_field(fields: dict[str, Any], changes: dict[str, Any], field: str) -> None:
    with pytest.raises(PenstockError, match=rf"config\.json: {field}") as caught:
        parse(fields, **changes)
    assert caught.value.code is ErrorCode.INTERNAL


@pytest.mark.parametrize(
    ("fields", "changes", "named"),
    [
        (QWEN, {"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv"),
        (QWEN, {"hidden_act": "gelu"}, "gelu"),
        (GLM, {"topk_method": "greedy"}, "topk_method"),
        (GPT, {"swiglu_limit": 9.0}, "swiglu_limit"),
        (GPT, {"quantization_config": {"quant_method": "bitnet"}}, "bitnet"),
    ],
)
def test_what_a_mixture_does_not_have_is_refused_by_name(
    fields: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(PenstockError, match=named) as caught:
        parse(fields, **changes)
    assert caught.value.code is ErrorCode.UNIMPLEMENTED


class Kernels(TorchOperations):
    """Multiplies experts as they are stored."""

    expert_forms = kernel_forms(torch.device("cpu"))


def assert_ranks_have_their_parts(
    directory: Path, case: Case, operations: TorchOperations, size: int, num_ranks: int = 2
) -> list[StackedLinear]:
    """Of three experts of this size, each rank has what stored tensors stand for; the products of all ranks."""
    torch.manual_seed(8)
    names = [f"e.{number}.{name}" for number in range(3) for name in ("gate", "up", "down")]
    drawn = {name: torch.randn(32, size) if "down" in name else torch.randn(size, 32) for name in names}
    quantized = {name: case.quantize(each) for name, each in drawn.items()}
    whole = {name: case.stands_for(pieces) for name, pieces in quantized.items()}
    tensors = {f"{name}.{suffix}": each for name, pieces in quantized.items() for suffix, each in pieces.items()}
    save_file({name: each.contiguous() for name, each in tensors.items()}, directory / "model.safetensors")
    gate, up, down = (StoredRows(f"e.{{expert}}.{name}") for name in ("gate", "up", "down"))
    spec = ExpertsSpec(3, RouterSpec("r", 2), GatedMLPSpec(size, gate, up, down))
    quantization = parse_quantization(case.config)
    found = []
    for rank in range(num_ranks):
        placement = Placement(torch.device("cpu"), torch.float32, Group(rank, num_ranks), operations, quantization)
        part = placement.columns(size, math.lcm(16, inputs_together(placement, spec, down)))
        inputs = StackedLinear(placement, spec, [Projection(each, size, part) for each in (gate, up)], 32)
        output = StackedLinear(placement, spec, [Projection(down, 32, slice(0, 32))], size, part)
        load_weights(directory, placement.wanted, placement.conversions, unused_suffixes=quantization.unused)
        for number in range(3):
            expected = torch.cat([whole[f"e.{number}.{name}"][part] for name in ("gate", "up")])
            torch.testing.assert_close(inputs.weight.of(number), expected)
            torch.testing.assert_close(output.weight.of(number), whole[f"e.{number}.down"][:, part])
        assert inputs.weight.inputs == 32
        assert inputs.weight.outputs == 2 * (part.stop - part.start)
        found += [inputs, output]
    return found


@pytest.mark.parametrize("operations", [TorchOperations(), Kernels()], ids=["widened", "as stored"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_quantized_experts_are_those_that_they_stand_for_on_each_rank(
    tmp_path: Path, case: Case, operations: TorchOperations
) -> None:
    assert_ranks_have_their_parts(tmp_path, case, operations, 96)


@pytest.mark.parametrize(("most_bytes", "together"), [(1 << 16, [6, 3]), (1, [1] * 9)])
def test_experts_that_are_alike_are_converted_by_the_same_calls_as_far_as_memory_should_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int, together: list[int]
) -> None:
    counts = []

    def convert(conversions: Sequence[Conversion], tensors: Tensors) -> None:
        counts.append(len(conversions))
        convert_together(conversions, tensors)

    monkeypatch.setattr(weights, "convert_together", convert)
    monkeypatch.setitem(weights._TOGETHER_BYTES, "cpu", most_bytes)
    assert_ranks_have_their_parts(tmp_path, BY_NAME["awq"], Kernels(), 96, num_ranks=1)
    assert counts == together


@pytest.mark.parametrize("case", PUBLISHED_FOURS, ids=lambda case: case.name)
@pytest.mark.parametrize(("size", "num_ranks", "inputs"), [(320, 2, [256, 64]), (384, 1, [384]), (208, 1, [208])])
def test_ranks_part_integers_of_4_bits_between_groups(
    tmp_path: Path, case: Case, size: int, num_ranks: int, inputs: list[int]
) -> None:
    found = assert_ranks_have_their_parts(tmp_path, case, Kernels(), size, num_ranks)
    assert all(isinstance(each.weight, StackedInt4) for each in found)
    assert [each.weight.inputs for each in found[1::2]] == inputs


@pytest.mark.parametrize(
    ("name", "size", "num_ranks"),
    [
        ("awq_published", 128, 2),  # there is but one group
        ("awq_published", 256, 3),
        ("mxfp4_packed", 40, 1),  # ups would begin within outputs that stand together
        ("packed_4_bits_outputs", 40, 1),
    ],
)
def test_experts_that_cannot_be_cut_as_they_are_stored_are_widened(
    tmp_path: Path, name: str, size: int, num_ranks: int
) -> None:
    found = assert_ranks_have_their_parts(tmp_path, BY_NAME[name], Kernels(), size, num_ranks)
    assert all(isinstance(each.weight, StackedFloats) for each in found)


@pytest.mark.parametrize(
    ("spec", "form"),
    [
        (Fp8ChannelSpec(rounds_inputs=True), StackedFp8Format()),
        (Fp8TensorSpec(rounds_inputs=True), StackedFp8Format()),
        (Fp8OnlineSpec(), StackedFp8Format()),
        (Fp8BlockSpec(16, 128, "weight_scale"), StackedFp8Format(128)),
        (Fp8BlockSpec(16, 20, "weight_scale"), None),  # groups of which kernels cannot take a step
        (Mxfp4Spec(has_blocks=False), StackedFp4Format()),
        *((AwqSpec(group), StackedInt4Format(group)) for group in (None, 16, 32, 64, 128, 384)),
        *((AwqSpec(group), None) for group in (8, 48, 192)),  # which no block has, or is a part of
        (GptqSpec(4, 32, has_order=False, zeros_less_one=True), StackedInt4Format(32)),
        (GptqSpec(4, 32, has_order=True, zeros_less_one=True), None),
        (GptqSpec(8, 32, has_order=False, zeros_less_one=True), None),
        (IntSpec(4, is_packed=True, group=128, has_zeros=False, has_order=False), StackedInt4Format(128)),
        (IntSpec(4, is_packed=True, group=128, has_zeros=False, has_order=True), None),
        (IntSpec(8, is_packed=True, group=128, has_zeros=False, has_order=False), None),
    ],
)
def test_experts_are_kept_in_the_form_that_kernels_multiply(spec: FormatSpec, form: StackedFormat | None) -> None:
    quantization = QuantizationSpec(spec, ignored=("e.0",))
    kept = find_stacked_reading(quantization, "e.1", Kernels.expert_forms).multiplied
    expected = form if form is not None else StackedFloatsFormat()
    assert (type(kept), kept.unit, kept.pieces) == (type(expected), expected.unit, expected.pieces)
    for name, forms in (("e.1", FLOATS_ALONE), ("e.0", Kernels.expert_forms)):
        assert isinstance(find_stacked_reading(quantization, name, forms).multiplied, StackedFloatsFormat)
    # Of one product, all are multiplied in one form.
    placement = Placement(torch.device("meta"), torch.bfloat16, operations=Kernels(), quantization=quantization)
    assert all(
        isinstance(each.multiplied, StackedFloatsFormat) for each in placement.stacked_readings_of(["e.0", "e.1"])
    )


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_outputs_of_stored_experts_are_scaled(factor: float) -> None:
    packed, exponents = (
        torch.randint(256, (2, 6, 48), dtype=torch.uint8),
        torch.randint(90, 150, (2, 6, 3)).to(torch.uint8),
    )
    found = [pack_fp4(*each) for each in zip(packed, exponents, strict=True)]
    fours = StackedFp4Format().stack({name: torch.stack([each[name] for each in found]) for name in found[0]}, 96)
    eights = StackedFp8(torch.randn(2, 6, 96).to(torch.float8_e4m3fn), torch.rand(2, 6, 3), 32)
    made = pack_int4(AwqFormat(AwqSpec(16)), BY_NAME["awq"].quantize(torch.randn(6, 96)))
    integers = StackedInt4Format(16).stack({name: torch.stack([each, each]) for name, each in made.items()}, 96)
    for weight in (fours, eights, integers):
        before = weight.of(1)
        weight.scale_outputs(factor)
        torch.testing.assert_close(weight.of(1), before * factor)


@pytest.mark.parametrize("layout", ["stacked", "transposed"])
def test_quantized_experts_in_one_tensor_are_refused_by_name(layout: Layout) -> None:
    quantization = QuantizationSpec(Fp8ChannelSpec(rounds_inputs=True))
    placement = Placement(torch.device("meta"), torch.bfloat16, quantization=quantization)
    rows = StoredRows("e")
    spec = ExpertsSpec(3, RouterSpec("r", 2), GatedMLPSpec(40, rows, rows, rows), layout)
    with pytest.raises(PenstockError, match=r"experts that one tensor holds \(e\)"):
        StackedLinear(placement, spec, [Projection(rows, 8, slice(0, 8))], 40)


def test_four_bit_floats_of_single_experts_are_refused_by_name() -> None:
    placement = Placement(torch.device("meta"), torch.bfloat16, quantization=QuantizationSpec(Mxfp4Spec()))
    rows = StoredRows("e.{expert}")
    spec = ExpertsSpec(3, RouterSpec("r", 2), GatedMLPSpec(64, rows, rows, rows))
    with pytest.raises(PenstockError, match=r"\(mxfp4\) of experts that are stored one by one \(e\.0\)"):
        StackedLinear(placement, spec, [Projection(rows, 8, slice(0, 8))], 64)


def test_a_router_has_floats_whatever_the_rest_has(tmp_path: Path) -> None:
    save_file({"r.weight": (weight := torch.randn(4, 32))}, tmp_path / "model.safetensors")
    quantization = QuantizationSpec(Fp8ChannelSpec(rounds_inputs=True))
    placement = Placement(torch.device("cpu"), torch.float32, quantization=quantization)
    router = Router(placement, RouterSpec("r", 2), 4, 32)
    load_weights(tmp_path, placement.wanted, placement.conversions)
    assert router.weight.equal(weight)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    spec = parse(GLM).decoder
    assert spec.unused_prefixes == ("model.layers.2.",)
    tensors = {"model.layers.2.eh_proj.weight": torch.ones(1), "model.layers.1.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    placement = Placement(torch.device("cpu"), torch.float32)
    placement.want("model.layers.1.weight", destination := torch.zeros(2), (2,))
    load_weights(tmp_path, placement.wanted, unused_prefixes=spec.unused_prefixes)
    assert destination.tolist() == [1, 1]
    with pytest.raises(PenstockError, match="eh_proj"):
        load_weights(tmp_path, placement.wanted)


def floats(linear: StackedLinear) -> Tensor:
    return torch.stack([linear.weight.of(expert) for expert in range(linear.weight.count)])


def stored(layout: Layout, weights: Tensor, biases: Tensor) -> dict[str, Tensor]:
    if layout == "single":
        of_kinds = {"weight": weights, "bias": biases}
        return {f"e.{number}.{name}": each[number] for name, each in of_kinds.items() for number in range(len(each))}
    if layout == "stacked":
        return {"e.weight": weights, "e.bias": biases}
    return {"e": weights.transpose(1, 2), "e_bias": biases}


@pytest.mark.parametrize("layout", ["single", "stacked", "transposed"])
def test_ranks_have_their_part_of_every_expert_and_one_adds_the_bias(tmp_path: Path, layout: Layout) -> None:
    weights, biases = torch.randn(3, 8, 40), torch.randn(3, 8)
    tensors = stored(layout, weights, biases)
    save_file({name: each.contiguous().clone() for name, each in tensors.items()}, tmp_path / "model.safetensors")
    rows = StoredRows("e.{expert}" if layout == "single" else "e")
    spec = ExpertsSpec(3, RouterSpec("r", 2), GatedMLPSpec(40, rows, rows, rows, has_bias=True), layout)
    found = []
    for rank in range(2):
        placement = Placement(torch.device("cpu"), torch.float32, Group(rank, 2))
        part = placement.columns(40, 16)
        found.append(StackedLinear(placement, spec, [Projection(rows, 8, slice(0, 8))], 40, part))
        load_weights(tmp_path, placement.wanted)
        found[-1].prepare()
    assert torch.cat([floats(each) for each in found], 2).equal(weights)
    assert found[0].weight.inputs == 32
    summed = sum(each.bias for each in found if each.bias is not None)
    assert isinstance(summed, Tensor)
    assert summed.equal(biases)


def test_outputs_that_stand_in_turns_are_told_apart(tmp_path: Path) -> None:
    weights, biases = torch.randn(3, 8, 5), torch.randn(3, 8)
    tensors = stored("transposed", weights, biases)
    save_file({name: each.contiguous().clone() for name, each in tensors.items()}, tmp_path / "model.safetensors")
    rows = [StoredRows("e", first, 8, every=2) for first in range(2)]
    spec = ExpertsSpec(3, RouterSpec("r", 2), GatedMLPSpec(4, *rows, rows[0], has_bias=True), "transposed")
    for rank in range(2):
        placement, mine = Placement(torch.device("cpu"), torch.float32, Group(rank, 2)), slice(2 * rank, 2 * rank + 2)
        linear = StackedLinear(placement, spec, [Projection(each, 4, mine) for each in rows], 5)
        load_weights(tmp_path, placement.wanted)
        order = [4 * rank, 4 * rank + 2, 4 * rank + 1, 4 * rank + 3]
        assert floats(linear).equal(weights[:, order])
        assert linear.bias is not None
        assert linear.bias.equal(biases[:, order])
