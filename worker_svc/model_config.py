"""The model that a checkpoint's `config.json` describes."""

from typing import Any

from contract.domain.errors import broken
from servicekit.checkpoint.model import CONFIG, Checkpoint, read_json
from worker_svc.core.config import ModelConfig, parse_config

# Files of those who quantize, for checkpoints whose configuration does not say it.
_BESIDE = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}


def read_model_config(checkpoint: Checkpoint) -> ModelConfig:
    """The model of a checkpoint.

    Raises:
        PenstockError: see `parse_config`; INTERNAL (the operator's fault): there is no `config.json`.
    """
    path = checkpoint.directory / CONFIG
    if not checkpoint.config:
        raise broken(
            f"{path} is missing, without which {checkpoint.directory} is no checkpoint: give the directory that holds "
            "it beside the weights, or fetch the checkpoint again"
        )
    return parse_config(_fields(checkpoint), str(path))


def _fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """Those of config.json, and a file beside it where that says how weights are stored."""
    if not checkpoint.config.get("quantization_config"):
        for name, method in _BESIDE.items():
            beside = read_json(checkpoint.directory / name)
            described = beside.get("quantization", beside)  # ModelOpt's has it within
            if described and isinstance(described, dict):
                described = {"quant_method": method, **described}
                return {**checkpoint.config, "quantization_config": described}
    return checkpoint.config
