"""The pieces that run transformers' modules: masks, attention, small configurations, refusals."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from contract.domain.errors import PenstockError
from servicekit.checkpoint.model import read_checkpoint
from worker_svc import implementation, inspection, transformers_loading
from worker_svc.core.transformers_models.attention import NAME, AttentionCalls, attach, register
from worker_svc.core.transformers_models.masks import Mask, make_mask
from worker_svc.core.transformers_models.mixing import refuse_mixing
from worker_svc.core.transformers_models.model import TransformersLM
from worker_svc.core.transformers_models.proof import prove
from worker_svc.core.transformers_models.refusal import NotDoneError
from worker_svc.core.transformers_models.shrinking import LONGEST, Shrinking, num_layers_of, shrinkings
from worker_svc.core.transformers_models.tiny import build, randomize, tiny
from worker_svc.factory import load_runner
from worker_svc.implementation import uses_transformers
from worker_svc.runner_options import RunnerOptions
from worker_svc.settings import WorkerSettings

CONFIG = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 50, "eos_token_id": 2}
CAUSAL = Mask(causal_mask_function)


class Remembering:
    """Implement `StepAttention`: gives each head its value."""

    positions = torch.arange(3)

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        self.counts, self.got = (num_heads, num_kv_heads, num_kv_heads), []

    def attend(self, layer: int, qkv: Tensor, *_: object, sinks: Tensor | None = None) -> Tensor:
        self.got.append((layer, qkv, sinks))
        heads = qkv.view(len(qkv), sum(self.counts), -1)
        values = heads.split(self.counts, 1)[2]
        return values.repeat_interleave(self.counts[0] // self.counts[2], 1).flatten(1)


def heads(num_heads: int = 4, num_kv_heads: int = 2, dim: int = 12, value_dim: int = 6) -> list[Tensor]:
    return [
        torch.randn(1, count, 3, size)
        for count, size in ((num_heads, dim), (num_kv_heads, dim), (num_kv_heads, value_dim))
    ]


def watched(*args: Any, mask: object = CAUSAL, **told: Any) -> AttentionCalls:
    calls = AttentionCalls(torch.float32)
    with calls.watch(32):
        out, _ = calls.attend(*(args or heads()), mask, told)
    assert not out.any()
    return calls


@pytest.mark.parametrize(
    ("rule", "window"),
    [
        (causal_mask_function, None),
        (sliding_window_causal_mask_function(8), 8),
        (sliding_window_causal_mask_function(1), 1),
        (sliding_window_causal_mask_function(64), None),
        (chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.int64)), None),
    ],
)
def test_masks_are_read_as_windows(rule: Callable[..., Tensor], window: int | None) -> None:
    mask = make_mask(batch_size=1, q_length=1, mask_function=rule, use_vmap=False)
    assert mask.window(64) == window


@pytest.mark.parametrize(
    "rule",
    [
        bidirectional_mask_function,
        chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.int64)),
        chunked_causal_mask_function(700, torch.zeros(1, dtype=torch.int64)),
        lambda batch, head, query, key: (key <= query) & (key % 2 == 0),
    ],
)
@pytest.mark.parametrize("length", [64, 1500])
def test_masks_that_are_no_windows_are_refused(rule: Callable[..., Tensor], length: int) -> None:
    if length == 64 and rule(0, 0, torch.tensor([[63]]), torch.arange(64)).all():
        return  # a chunk that nothing passes, or everything at the last query: the longer one tells
    with pytest.raises(NotDoneError, match="see others than all before"):
        make_mask(mask_function=rule).window(length)


def test_windows_are_exact_in_contexts_too_long_to_look_at_every_query() -> None:
    assert make_mask(mask_function=sliding_window_causal_mask_function(700)).window(5000) == 700
    assert make_mask(mask_function=causal_mask_function).window(5000) is None


def test_a_mask_of_rules_of_its_own_is_refused() -> None:
    with pytest.raises(NotDoneError, match="a mask of its own"):
        make_mask(mask_function=causal_mask_function, use_vmap=True).window(8)


def test_attention_is_asked_for_what_was_watched_and_values_keep_their_size() -> None:
    query, key, value = heads()
    calls = watched(query, key, value, scaling=0.5, s_aux=torch.zeros(4), softcap=3.0, dropout=0.0, output=None)
    (call,) = calls.calls
    assert (call.num_heads, call.num_kv_heads, call.head_dim, call.value_dim, calls.cached_dim) == (4, 2, 12, 6, 16)
    assert (call.scale, call.softcap, call.has_sinks, call.window) == (0.5, 3.0, True, None)
    step = Remembering(4, 2)
    with calls.serve(step):
        out, weights = calls.attend(query, key, value, CAUSAL, {"scaling": 0.5, "softcap": 3.0, "s_aux": torch.ones(4)})
    assert weights is None
    torch.testing.assert_close(out[0], value[0].repeat_interleave(2, 0).transpose(0, 1))
    [(layer, qkv, sinks)] = step.got
    assert (layer, qkv.shape, sinks.tolist()) == (0, (3, 8 * 16), [1.0] * 4)


def test_heads_are_cached_in_the_dtype_of_the_model_whatever_they_were_rotated_in() -> None:
    query, key, value = heads()
    calls = AttentionCalls(torch.bfloat16)
    with calls.watch(32):
        calls.attend(query, key, value, CAUSAL, {})
    step = Remembering(4, 2)
    with calls.serve(step):
        out, _ = calls.attend(query, key, value.bfloat16(), CAUSAL, {})
    assert {step.got[0][1].dtype, out.dtype} == {torch.bfloat16}


def test_a_scale_that_changes_and_calls_that_are_missing_are_refused() -> None:
    calls = watched(scaling=0.5)
    with pytest.raises(NotDoneError, match="from step to step"), calls.serve(Remembering(4, 2)):
        calls.attend(*heads(), CAUSAL, {"scaling": 0.6})
    with pytest.raises(NotDoneError, match="attends 0 times"), calls.serve(Remembering(4, 2)):
        pass


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"block_indices": [1]}, "block_indices"),
        ({"dropout": 0.1}, "dropout"),
        ({"head_mask": torch.ones(4)}, "head_mask"),
        ({"sliding_window": 8}, "sliding_window 8, its mask of none"),
        ({"scaling": torch.tensor(0.5)}, "by a tensor"),
        ({"s_aux": torch.zeros(4, 1)}, "sinks of shape"),
        ({"mask": None}, "no mask"),
        ({"mask": torch.zeros(1, 1, 3, 3)}, "a mask of its own"),
    ],
)
def test_what_attention_is_told_and_does_not_do_is_refused_by_name(told: dict[str, Any], why: str) -> None:
    with pytest.raises(NotDoneError, match=why):
        watched(*heads(), **told)


def test_heads_that_do_not_fit_are_refused() -> None:
    query, key, value = heads()
    with pytest.raises(NotDoneError, match="of shapes"):
        watched(query, key[..., :4], value)
    with pytest.raises(NotDoneError, match="of shapes"):
        watched(query, key, value[:, :1])


def test_small_configurations_keep_ratios_and_pass_the_bounds_that_contexts_pass() -> None:
    fields = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "eos_token_id": [128001, 2],
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "num_local_experts": 128,
        "expert_size": 2048,
        "index_topk": 2048,
        "layer_types": ["full"] * 80,
        "per_layer": {0: {"hidden_size": 64}, 70: {"hidden_size": 64}},
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        "rope_parameters": {"original_max_position_embeddings": 8192, "long_factor": [1.0] * 64},
    }
    shrinking = next(shrinkings(fields, 131072))
    small = shrinking.shrink(fields, 3)
    assert num_layers_of(fields) == 80
    assert small["num_hidden_layers"] == len(small["layer_types"]) == 3
    assert small["num_attention_heads"] == 8 * small["num_key_value_heads"] == 16
    head_dim = small["hidden_size"] // small["num_attention_heads"]
    assert head_dim == 16 == 2 * len(small["rope_parameters"]["long_factor"])
    assert (small["vocab_size"], small["eos_token_id"], small["num_local_experts"]) == (128, [127, 2], 128)
    assert small["sliding_window"] < small["rope_parameters"]["original_max_position_embeddings"] < 44 < LONGEST
    assert small["max_position_embeddings"] == LONGEST
    assert small["index_topk"] == 8
    assert small["expert_size"] == 2048 // 32
    assert small["per_layer"].keys() == {0}
    assert (small["rms_norm_eps"], small["use_cache"]) == (1e-6, True)
    assert {small["sliding_window"], LONGEST} == {
        each.shrink(fields)["sliding_window"] for each in (shrinking, Shrinking(1, 1, 4096))
    }


def test_a_single_key_keeps_all_its_queries() -> None:
    fields = {"n_head": 48, "num_kv_heads": 1, "n_embd": 6144}
    assert next(shrinkings(fields, 100)).heads == 1


def test_a_tiny_instance_has_a_layer_of_each_kind_and_weights_that_all_count() -> None:
    small = tiny(GPT2Config(n_layer=12), 1024)
    assert len(small.transformer.h) == 2
    assert all(bool(each.any()) for each in small.parameters())
    with pytest.raises(NotDoneError, match="cannot be made small"):
        tiny(GPT2Config(activation_function="strange"), 1024)


class Leaking(nn.Module):
    """Adds to each token the sum of those before."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + hidden.cumsum(1)


def model(**changes: Any) -> PreTrainedModel:
    register()
    torch.manual_seed(0)
    return build(GPT2Config(**(CONFIG | changes)), NAME)


def test_a_module_that_carries_tokens_on_is_named() -> None:
    module = model()
    calls = AttentionCalls(torch.float32)
    attach(module, calls)
    refuse_mixing(module, calls, 16)
    module.transformer.h[1].ln_2 = Leaking()
    attach(module, calls)
    with pytest.raises(NotDoneError, match=r"transformer\.h\.1\.ln_2 \(Leaking\) keeps state"):
        refuse_mixing(module, calls, 16)


def test_families_of_ours_are_loaded_without_transformers() -> None:
    code = (
        "import sys\n"
        "from penstock.launcher.layout import BUNDLED_MODEL\n"
        "from servicekit.checkpoint.model import read_checkpoint\n"
        "from worker_svc import factory, implementation\n"
        "from worker_svc.runner_options import RunnerOptions\n"
        "implementation.find_loader(RunnerOptions(str(BUNDLED_MODEL)), read_checkpoint(BUNDLED_MODEL))\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_heads_of_several_sizes_are_padded_to_the_largest() -> None:
    calls = AttentionCalls(torch.float32)
    one, other = heads(dim=12, value_dim=6), heads(dim=20, value_dim=20)
    with calls.watch(32):
        for each in (one, other):
            calls.attend(*each, CAUSAL, {})
    step = Remembering(4, 2)
    with calls.serve(step):
        found = [calls.attend(*each, CAUSAL, {})[0] for each in (one, other)]
    for (_, _, value), out in zip((one, other), found, strict=True):
        torch.testing.assert_close(out[0], value[0].repeat_interleave(2, 0).transpose(0, 1))
    assert [qkv.shape for _, qkv, _ in step.got] == [(3, 8 * 24)] * 2


def test_layers_that_differ_in_heads_are_refused() -> None:
    module = model()
    module.transformer.h[1].attn.num_heads, module.transformer.h[1].attn.head_dim = 2, 16
    with pytest.raises(NotDoneError, match="differ in numbers of heads"):
        TransformersLM(module, 16)


def save(directory: Path, **changes: Any) -> None:
    config = GPT2Config(**CONFIG)
    module: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    randomize(module)
    module.save_pretrained(directory)
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | changes))


def load(directory: Path, **options: Any) -> Any:
    return load_runner(RunnerOptions(str(directory), device="cpu", num_blocks=32, **options), lambda: 0)


@pytest.mark.parametrize(
    ("changes", "options", "why"),
    [
        (
            {"model_type": "strange", "auto_map": {"AutoModel": "code.Model"}},
            {},
            "GPT2LMHeadModel .* its code comes with",
        ),
        ({"model_type": "strange"}, {}, "model_type 'strange' that transformers"),
        ({"architectures": ["GPT2ForTokenClassification"]}, {}, "whose decoder of gpt2 is GPT2LMHeadModel"),
        ({"quantization_config": {"quant_method": "awq"}}, {}, "quantized weights"),
        ({}, {"quantization": "fp8"}, "quantization 'fp8' for a module of transformers'"),
        ({}, {"world_size": 2}, "tensor_parallel_size 2 for a module of transformers'"),
        ({}, {"model_impl": "penstock"}, r"GPT2LMHeadModel \(there are"),
        ({}, {"model_impl": "vllm"}, "model_impl must be auto, penstock, transformers"),
        ({}, {"trust_remote_code": True}, "trust_remote_code"),
        ({"n_embd": "wide"}, {}, "is not what transformers' gpt2 has"),
    ],
)
def test_what_is_not_done_is_refused_before_weights_are_read(
    changes: dict[str, Any], options: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, **changes)
    monkeypatch.setattr(transformers_loading, "_with_weights", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(PenstockError, match=why):
        load(tmp_path, **options)


def test_code_of_a_checkpoint_is_not_run_where_transformers_has_its_own(tmp_path: Path) -> None:
    save(tmp_path, auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"})
    (tmp_path / "code.py").write_text("raise SystemExit('the code of a checkpoint is run')")
    assert load(tmp_path).implementation == "transformers"


def test_a_checkpoint_with_an_adapter_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(PenstockError, match="changed by an adapter"):
        load(tmp_path)


def test_what_modules_draw_at_first_leaves_the_caller_his_numbers() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    prove(GPT2Config(n_layer=12), 1024)
    assert torch.rand(2).tolist() == expected


def test_a_package_that_is_missing_is_said_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    monkeypatch.setattr(implementation, "find_spec", lambda name: None)
    with pytest.raises(PenstockError, match=r"GPT2LMHeadModel .* install penstock\[transformers\]"):
        load(tmp_path)


def test_a_package_that_cannot_be_imported_is_said_likewise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    monkeypatch.setitem(sys.modules, "worker_svc.transformers_loading", None)
    with pytest.raises(PenstockError, match=r"cannot be imported \(.*\): install penstock\[transformers\]"):
        load(tmp_path)


def test_families_of_ours_come_first_unless_the_other_is_asked_for(tmp_path: Path) -> None:
    for name, model_impl, expected in (
        ("LlamaForCausalLM", "auto", False),
        ("LlamaForCausalLM", "transformers", True),
        ("GPT2LMHeadModel", "auto", True),
        ("GPT2LMHeadModel", "penstock", False),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        assert uses_transformers(model_impl, read_checkpoint(tmp_path)) is expected


def test_tensors_that_are_missing_or_too_many_are_named(tmp_path: Path) -> None:
    save(tmp_path, n_layer=3)
    with pytest.raises(PenstockError, match=r"lacks the tensor .*h\.2\..* more"):
        load(tmp_path)
    save(tmp_path, n_layer=1)
    with pytest.raises(PenstockError, match=r"tensor that the model does not have: .*h\.1\."):
        load(tmp_path)


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    loaded = load(tmp_path, load_format="dummy")
    assert loaded.runner.limits.vocab_size == 50
    assert loaded.kernels == "torch, module transformers"
    with pytest.raises(PenstockError, match=r"model\.safetensors is missing"):
        load(tmp_path)


def test_a_model_is_described_without_its_weights(tmp_path: Path) -> None:
    save(tmp_path)
    found = inspection.inspect(WorkerSettings(model=str(tmp_path), device="cpu", redis_url="unix:///nowhere"))
    assert (found["architecture"], found["implementation"], found["layers"]) == ("GPT2LMHeadModel", "transformers", 2)
    assert found["memory_bytes"] == 4 * sum(each.numel() for each in model().parameters())
