"""Making a runner from a checkpoint directory: what comes out, and what is refused by name."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoints import MAX_POSITIONS, VARIANTS, VOCAB_SIZE, save_checkpoint

from penstock.domain.errors import ErrorCode, PenstockError
from worker_svc.factory import LoadedRunner, load_runner
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
    assert (limits.max_model_len, limits.vocab_size, limits.eos_token_ids) == (MAX_POSITIONS, VOCAB_SIZE, (2,))
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


def test_generation_config_has_the_last_word_on_eos(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert load(tmp_path).runner.limits.eos_token_ids == (2, 9)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"quantization": "awq"}, "awq"),
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
