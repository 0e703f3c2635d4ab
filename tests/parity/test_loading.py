"""Making a runner from a checkpoint directory: what comes out, and what is refused by name."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import write_tokenizer
from checkpoints import MAX_POSITIONS, VARIANTS, VOCAB_SIZE, save_checkpoint

from contract.domain.errors import ErrorCode, PenstockError
from penstock import LLM, SamplingParams
from worker_svc.core.step_sizes import StepSizes
from worker_svc.factory import LoadedRunner, load_runner, taken_bytes
from worker_svc.runner_options import RunnerOptions

BLOCK_BYTES = 2 * 3 * 16 * 2 * 16 * 4  # keys and values, layers, tokens, heads, head size, fp32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(directory, VARIANTS[0])
    return directory


def load(directory: Path, **options: Any) -> LoadedRunner:
    return load_runner(RunnerOptions(str(directory), **({"device": "cpu"} | options)), time.monotonic_ns)


def test_limits_say_what_was_loaded(checkpoint: Path) -> None:
    loaded = load(checkpoint, max_num_seqs=4)
    limits = loaded.runner.limits
    assert limits.num_blocks == 4 * MAX_POSITIONS // 16
    assert (limits.max_model_len, limits.vocab_size) == (MAX_POSITIONS, VOCAB_SIZE)
    assert loaded.profile.block_bytes == BLOCK_BYTES
    assert loaded.profile.kv_cache_bytes == limits.num_blocks * BLOCK_BYTES
    parameters = sum(size["numel"] for size in _tensors(checkpoint))
    assert loaded.profile.weights_bytes == parameters * 4
    loaded.close()


def _tensors(directory: Path) -> list[dict[str, int]]:
    from safetensors import safe_open

    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return [{"numel": file.get_tensor(name).numel()} for name in file.keys()]  # noqa: SIM118


def test_the_context_is_cut_to_the_memory_unless_it_was_asked_for(checkpoint: Path) -> None:
    limits = load(checkpoint, kv_cache_memory_bytes=3 * BLOCK_BYTES + 5).runner.limits
    assert (limits.num_blocks, limits.max_model_len) == (3, 48)
    with pytest.raises(PenstockError, match="max_model_len 100 tokens needs"):
        load(checkpoint, kv_cache_memory_bytes=3 * BLOCK_BYTES, max_model_len=100)


@pytest.mark.parametrize(
    ("asked", "num_seqs", "num_saved"),
    [
        ({}, 48, 48),
        ({"max_num_seqs": 100}, 100, 100),
        ({"num_saved_states": 0, "max_num_seqs": 100}, 100, 0),
        ({"num_saved_states": 70, "max_num_seqs": 100}, 100, 70),
    ],
)
def test_states_take_half_of_the_memory_unless_sequences_were_asked_for_and_as_many_are_saved(
    asked: dict[str, Any], num_seqs: int, num_saved: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the memory there is room for the keys and values of 64 sequences, and for 60 states in half of it."""
    save_checkpoint(tmp_path, next(each for each in VARIANTS if each.name == "qwen3_5_states"))
    with caplog.at_level("INFO", "worker_svc.factory"):
        loaded = load(tmp_path, kv_cache_memory_bytes=1 << 21, **asked)
    assert loaded.runner.limits.max_num_seqs == num_seqs
    assert loaded.runner.limits.has_state
    assert loaded.runner.limits.num_saved_states == num_saved
    assert loaded.profile.state_bytes == (num_seqs + 1 + num_saved) * 2 * (4 * 160 + 4 * 16 * 24) * 4
    assert [each.message for each in caplog.records].count("layers keep a state") == 1
    assert ("fewer sequences at once" in caplog.messages) is not bool(asked)
    loaded.close()


@pytest.mark.parametrize(
    ("asked", "num_bytes"),
    [
        ({}, 97 * 10),
        ({"max_num_seqs": 20}, 21 * 10),
        ({"max_num_batched_tokens": 8}, 9 * 10),
        ({"num_blocks": 7}, 97 * 10 + 7 * 3),
        ({"kv_cache_memory_bytes": 500, "num_blocks": 7}, 97 * 10 + 500),
    ],
)
def test_saved_states_have_a_share_of_what_slots_and_blocks_leave(asked: dict[str, Any], num_bytes: int) -> None:
    options = RunnerOptions("model", **asked)
    assert taken_bytes(options, StepSizes(2048, 96), block_bytes=3, state_bytes=10) == num_bytes


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"quantization": "awq"}, r"quantization \(awq\)"),
        ({"trust_remote_code": True}, "trust_remote_code"),
    ],
)
def test_options_that_are_not_there_yet_fail_by_name(options: dict[str, Any], named: str, checkpoint: Path) -> None:
    with pytest.raises(PenstockError, match=named) as caught:
        load(checkpoint, **options)
    assert caught.value.code is ErrorCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"device": "cuda"}, "device"),
        ({"max_model_len": MAX_POSITIONS + 1}, "max_model_len"),
        ({"num_saved_states": 4}, "num_saved_states"),
    ],
)
def test_options_that_make_no_sense_name_themselves(
    options: dict[str, Any], param: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(PenstockError) as caught:
        load(checkpoint, **options)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.param == param


def test_a_linear_ropes_stretched_context_can_be_used_by_worker_and_tokenizer(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    variant = next(each for each in VARIANTS if each.name == "llama_linear_rope_wide_heads")
    save_checkpoint(tmp_path, variant)
    write_tokenizer(tmp_path)
    stretched = 2 * MAX_POSITIONS
    llm = LLM(str(tmp_path), max_model_len=stretched)
    prompt = [3 + (7 * index) % 250 for index in range(stretched - 40)]
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert output.outputs[0].token_ids == ids[0, len(prompt) :].tolist()
    with pytest.raises(PenstockError, match=f"{stretched + 1}.* {stretched}"):
        load(tmp_path, max_model_len=stretched + 1)


def test_a_tied_models_other_head_is_used_as_in_transformers(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2ForCausalLM

    variant = next(each for each in VARIANTS if each.name == "qwen2_tied")
    save_checkpoint(tmp_path, variant)
    write_tokenizer(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (tied,) = LLM(str(tmp_path)).generate([[5, 6, 7]], params, use_tqdm=False)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    (output,) = LLM(str(tmp_path)).generate([[5, 6, 7]], params, use_tqdm=False)
    model = Qwen2ForCausalLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        ids = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert output.outputs[0].token_ids == ids[0, 3:].tolist() != tied.outputs[0].token_ids
