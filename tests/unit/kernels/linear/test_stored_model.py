"""A whole model with weights that kernels multiply as they are stored and torch widens, by both."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import VARIANTS, save_checkpoint
from kernel_inputs import DEVICE
from plans import drive_few_and_many_rows
from quantized import BY_NAME, save_quantized

from contract.domain.errors import ErrorCode, PenstockError
from worker_svc import native
from worker_svc.core.operations import torch_operations, triton_operations
from worker_svc.factory import load_runner
from worker_svc.runner_options import RunnerOptions

VARIANT = next(each for each in VARIANTS if each.name == "qwen3_biases")
pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="on the CPU, where Triton interprets")


@pytest.mark.parametrize(
    ("format_", "hidden_size", "kept"),
    [
        ("awq", 128, "int4"),
        ("gptq_4_bits_one_group", 128, "int4"),
        ("packed_4_bits_zeros", 128, "int4"),
        ("packed_4_bits_groups", 128, "int4"),
        ("fp8_block_published", 256, "float8_e4m3fn"),
    ],
)
def test_weights_as_they_are_stored_give_what_widened_ones_give(
    tmp_path: Path, format_: str, hidden_size: int, kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By kernels and by torch, in fp16, which the interpreter rounds as devices do."""
    caplog.set_level("INFO")
    sizes = {"head_dim": 64, "hidden_size": hidden_size, "intermediate_size": 256, "num_hidden_layers": 2}
    save_checkpoint(tmp_path / "whole", replace(VARIANT, options={**VARIANT.options, **sizes}))
    save_quantized(tmp_path / "whole", tmp_path / "stored", BY_NAME[format_])
    found, sizes_of_weights = [], []
    for attention in ("torch", "triton"):
        options = RunnerOptions(
            str(tmp_path / "stored"), device="cpu", dtype="float16", num_blocks=50, attention=attention
        )
        loaded = load_runner(options, lambda: 0)
        sequences = drive_few_and_many_rows(loaded.runner)
        sizes_of_weights.append(loaded.profile.weights_bytes)
        loaded.close()
        found.append(sequences)
    for by_torch, by_kernels in zip(*found, strict=True):
        assert by_kernels.output == by_torch.output
        pairs = zip(by_kernels.logprobs, by_torch.logprobs, strict=True)
        assert max(abs(one - other) for one, other in pairs) < 2e-2
    assert sizes_of_weights[1] < sizes_of_weights[0]
    events = [(each.message, each.__dict__["to"]) for each in caplog.records if hasattr(each, "to")]
    assert events == [("weights widened", "float16"), ("weights converted", kept)]


@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize("format_", ["fp8_tokens", "fp8_tensor_static", "fp8_block_published"])
def test_8_bit_floats_are_widened_and_that_is_told_where_a_card_has_none(
    format_: str, attention: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    for operations in (triton_operations, torch_operations):
        monkeypatch.setattr(operations, "kernels_have_fp8", lambda _: False)
    sizes = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 256}
    save_checkpoint(tmp_path / "whole", replace(VARIANT, options={**VARIANT.options, **sizes}))
    save_quantized(tmp_path / "whole", tmp_path / "stored", BY_NAME[format_])
    options = RunnerOptions(str(tmp_path / "stored"), device="cpu", dtype="float16", num_blocks=50, attention=attention)
    load_runner(options, lambda: 0).close()
    events = [(each.message, each.__dict__["to"]) for each in caplog.records if hasattr(each, "to")]
    assert events == [("weights widened", "float16")]


def test_rounding_to_8_bits_is_refused_where_a_card_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernels_have_fp8", lambda device: device != torch.device("cpu"))
    save_checkpoint(tmp_path, VARIANT)
    options = RunnerOptions(str(tmp_path), device="cpu", dtype="float16", num_blocks=50, quantization="fp8")
    with pytest.raises(PenstockError, match="has no 8-bit floats") as caught:
        load_runner(options, lambda: 0)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARGUMENT, "quantization")
