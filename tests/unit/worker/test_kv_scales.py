"""Keys and values in 8 bits: what is kept of a number, how blocks move, and where checkpoints have the scales."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import BY_NAME, save_quantized
from safetensors.torch import save_file
from tiny_models import CONFIG, save_model
from torch import Tensor

from contract.domain.errors import ErrorCode, PenstockError
from penstock import LLM
from servicekit.checkpoint.model import read_checkpoint
from worker_svc.core.kv_cache import KVCache, KVCacheShape
from worker_svc.core.kv_scales import KVScales, narrow, widen
from worker_svc.core.models.spec import AttentionSpec
from worker_svc.core.quantization.choice import parse_quantization
from worker_svc.factory import load_runner
from worker_svc.kv_scales import read_kv_scales
from worker_svc.native import NativeLoader
from worker_svc.runner_options import RunnerOptions

ATTENTIONS = [each for each in CONFIG.decoder.attentions if isinstance(each, AttentionSpec)]
ATTENTION = "model.layers.1.self_attn"
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


def test_what_is_kept_is_the_nearest_and_what_is_too_large_the_largest() -> None:
    x = torch.tensor([1.0, 1.06, 1.07, -3.3, 1000.0, -1e9, 0.0, 2**-9, torch.inf])
    assert widen(narrow(x, 1.0), 1.0, torch.float32).tolist() == [1.0, 1.0, 1.125, -3.25, 448, -448, 0.0, 2**-9, 448]
    assert widen(narrow(x, 4.0), 4.0, torch.float32).tolist()[3:5] == [-3.25, 1024.0]
    assert bool(narrow(torch.tensor(torch.nan), 1.0).isnan())


@pytest.mark.parametrize("shares_values", [True, False])
def test_blocks_of_eight_bits_take_a_byte_a_number_and_are_copied_whole(*, shares_values: bool) -> None:
    shape = KVCacheShape(2, 3, 8, 4, torch.bfloat16, shares_values=shares_values, scales=KVScales.of_one(2))
    assert shape.block_bytes == 2 * 4 * 3 * 8 * (1 if shares_values else 2)
    cache = KVCache(shape, 5, torch.device("cpu"))
    assert cache.keys.nbytes + (0 if shares_values else cache.values.nbytes) == 5 * shape.block_bytes
    cache.keys.copy_(torch.randn(cache.keys.shape))
    before = cache.keys.float()
    cache.copy_blocks(torch.tensor([0, 1]), torch.tensor([1, 3]))
    assert cache.keys.float().equal(before[:, [0, 0, 2, 1, 4]])
    assert bool((cache.values.float() == 0).all()) is not shares_values


def read(directory: Path, tensors: dict[str, Tensor]) -> KVScales:
    save_file({"anything": torch.zeros(3), **tensors}, directory / "model.safetensors")
    return read_kv_scales(directory, ATTENTIONS)


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_are_found_under_all_their_names(keys: str, values: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        f"{ATTENTION}.{keys}": torch.tensor(0.25, dtype=dtype),
        f"{ATTENTION}.{values}": torch.tensor([0.5], dtype=dtype),
    }
    expected = KVScales((1.0, 0.25), (1.0, 0.5))
    assert read(tmp_path, tensors) == expected
    assert read(tmp_path, {name.removeprefix("model."): each for name, each in tensors.items()}) == expected


def test_one_scale_may_be_that_of_both_and_none_is_one(tmp_path: Path) -> None:
    assert read(tmp_path, {f"{ATTENTION}.kv_scale": torch.tensor(0.25)}) == KVScales((1.0, 0.25), (1.0, 0.25))
    assert read(tmp_path, {}) == KVScales.of_one(2)


@pytest.mark.parametrize(
    ("tensors", "named", "code"),
    [
        ({"k_scale": torch.tensor(0.1)}, f"no file of the checkpoint {ATTENTION}.v_scale", ErrorCode.INTERNAL),
        ({"k_scale": torch.zeros(1), "v_scale": torch.ones(1)}, "k_scale 0, which is no scale", ErrorCode.INTERNAL),
        ({"k_scale": torch.ones(1), "v_scale": torch.tensor(torch.nan)}, "v_scale nan", ErrorCode.INTERNAL),
        ({"k_scale": torch.ones(2), "v_scale": torch.ones(2)}, r"scales of the shape \[2\]", ErrorCode.UNIMPLEMENTED),
    ],
    ids=["one", "zero", "nan", "heads"],
)
def test_what_is_no_scale_is_named(tensors: dict[str, Tensor], named: str, code: ErrorCode, tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match=named) as caught:
        read(tmp_path, {f"{ATTENTION}.{name}": each for name, each in tensors.items()})
    assert caught.value.code is code


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {**SCHEME, "type": "int"}}, "type 'int'"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {**SCHEME, "num_bits": 4}}, "num_bits 4"),
        (
            {"quant_method": "compressed-tensors", "kv_cache_scheme": {**SCHEME, "strategy": "attn_head"}},
            "strategy 'attn_head'",
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, "'NVFP4'"),
    ],
    ids=["integers", "four_bits", "heads", "modelopt"],
)
def test_other_schemes_are_refused_by_name_where_eight_bits_are_asked_for(
    config: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save_model(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    checkpoint = replace(checkpoint, config={**checkpoint.config, "quantization_config": config})
    NativeLoader(RunnerOptions(str(tmp_path)), checkpoint)
    with pytest.raises(PenstockError, match=f"kv_cache_dtype 'fp8' of .* {named}") as caught:
        NativeLoader(RunnerOptions(str(tmp_path), kv_cache_dtype="fp8"), checkpoint)
    assert caught.value.code is ErrorCode.UNIMPLEMENTED


def test_a_checkpoint_may_say_of_its_keys_and_values_alone_how_they_are_kept() -> None:
    told = parse_quantization({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME})
    assert (told.has_kv_scales, told.other_kv_scheme) == (True, None)
    assert not told.covers("model.layers.0.self_attn.q_proj")
    of_modelopt = parse_quantization({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"})
    assert (of_modelopt.has_kv_scales, of_modelopt.other_kv_scheme) == (True, None)


def test_scales_beside_quantized_weights_are_used_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    save_model(tmp_path)
    config = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
    case = replace(BY_NAME["fp8_tensor_static"], extra={"k_scale": torch.tensor(0.25), "v_scale": torch.tensor(0.5)})
    save_quantized(tmp_path, tmp_path / "quantized", case, config=config)
    options = RunnerOptions(str(tmp_path / "quantized"), device="cpu", kv_cache_dtype="fp8", max_model_len=32)
    loaded = load_runner(options, time.monotonic_ns)
    assert loaded.runner._cache.shape.scales == KVScales((0.25, 0.25), (0.5, 0.5))
    loaded.close()
    assert "kept as 8-bit floats" in caplog.text
    assert "scales of keys and values are not used" not in caplog.text


def test_random_weights_have_scales_of_one(tmp_path: Path) -> None:
    save_model(tmp_path)
    options = RunnerOptions(str(tmp_path), device="cpu", kv_cache_dtype="fp8", load_format="dummy", max_model_len=32)
    loaded = load_runner(options, time.monotonic_ns)
    assert loaded.runner._cache.shape.scales == KVScales.of_one(2)
    loaded.close()


def test_a_name_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(PenstockError, match="kv_cache_dtype") as caught:
        LLM("nothing", kv_cache_dtype="int8")
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
