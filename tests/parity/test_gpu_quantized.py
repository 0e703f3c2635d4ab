"""On a GPU, quantized models whose weights kernels multiply as they are stored, beside transformers' with the weights
that these stand for.
"""

from pathlib import Path

import pytest
import torch
from checkpoints import GPT_OSS, OF_EXPERTS, Variant, save_rounded_checkpoint
from near_the_likeliest import assert_near_the_likeliest, load, sequences
from plans import drive
from quantized import BY_NAME, round_inputs, save_mxfp4, save_quantized
from transformers import AutoModelForCausalLM, Mxfp4Config, PreTrainedModel

from contract.domain.params import Sampling

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DENSE = Variant("qwen3", "qwen3", {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512})
# All are chosen: of two that are almost as good, rounding would choose the other.
OF_ALL = {**OF_EXPERTS, "num_experts_per_tok": 8, "moe_intermediate_size": 128, "norm_topk_prob": True}
MIXTURE = Variant("qwen3_moe", "qwen3_moe", {**OF_ALL, "head_dim": 64, "hidden_size": 256})
SINKS = Variant(
    "gpt_oss",
    "gpt_oss",
    {**GPT_OSS, "num_experts_per_tok": 8, "head_dim": 64, "hidden_size": 128, "sliding_window": 70},
)
ROUNDED = ("fp8_tokens", "fp8_tensor_static")
# In bf16, and an eighth of it in fp16, in which plain torch on a CPU is off by 0.08 once, and not at the maximum in 2 %
# of the tokens (gpt-oss). In bf16 single tokens of mixtures were off by up to 1.4 on an H200, and by 1.8 of floats.
MOST_OFF, SHARE_OFF = 2.0, 0.25
MOST_OFF_OF_ROUNDED = 3.0  # in bf16, of which plain torch on a CPU is off by 1.96 once, and in 19 % of the tokens


def assert_tokens_like(model: PreTrainedModel, directory: Path, dtype: torch.dtype, most_off: float = MOST_OFF) -> None:
    loaded = load(directory, dtype=str(dtype).removeprefix("torch."), attention="triton")
    loaded.runner._cache.keys.fill_(torch.nan)
    loaded.runner._cache.values.fill_(torch.nan)
    drives = sequences(Sampling(temperature=0.0))
    drive(loaded.runner, drives, chunk=100, window=3, stagger=1)
    assert_near_the_likeliest(model, drives, dtype, most_off, SHARE_OFF)


@pytest.mark.parametrize(
    ("variant", "format_"),
    [
        (DENSE, "awq"),
        (DENSE, "awq_published"),
        (DENSE, "gptq_4_bits_one_group"),
        (DENSE, "packed_4_bits_zeros"),
        (DENSE, "fp8_channel"),
        (DENSE, "fp8_block_published"),
        *((DENSE, name) for name in ROUNDED),
        (MIXTURE, "fp8_channel"),
        (MIXTURE, "fp8_block_published"),
        *((MIXTURE, name) for name in ("awq", "awq_published", "gptq_4_bits_one_group", "packed_4_bits_zeros")),
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_tokens_are_near_the_likeliest_of_the_weights_that_are_stood_for(
    variant: Variant, format_: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    # An input between two numbers of 8 bits becomes either, when it was rounded before.
    dtype = torch.bfloat16 if format_ in ROUNDED else torch.float16
    save_rounded_checkpoint(tmp_path / "whole", variant, dtype)
    for is_dense in (True, False):
        save_quantized(tmp_path / "whole", tmp_path / str(is_dense), BY_NAME[format_], is_dense=is_dense)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "True", dtype=torch.float32, attn_implementation="eager")
    if format_ in ROUNDED:
        round_inputs(model)
    assert_tokens_like(model, tmp_path / "False", dtype, MOST_OFF_OF_ROUNDED if format_ in ROUNDED else MOST_OFF)
    assert "weights widened" not in [each.message for each in caplog.records]


def test_tokens_of_experts_of_4_bits_are_near_the_likeliest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    save_rounded_checkpoint(tmp_path / "whole", SINKS, torch.float16)
    save_mxfp4(tmp_path / "whole", tmp_path / "stored")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "stored",
        quantization_config=Mxfp4Config(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    assert_tokens_like(model, tmp_path / "stored", torch.float16)
    assert "weights widened" not in [each.message for each in caplog.records]
