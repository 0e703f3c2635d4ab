"""The model that a checkpoint's `config.json` describes."""

from collections.abc import Mapping
from typing import Any

from contract.domain.errors import broken
from servicekit.checkpoint.model import CONFIG, Checkpoint, read_json
from worker_svc.core.config import ModelConfig, parse_config

_MODELOPT = "hf_quant_config.json"


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
    """Those of config.json, and ModelOpt's file beside it where that says how weights are stored."""
    beside = read_json(checkpoint.directory / _MODELOPT).get("quantization")
    if checkpoint.config.get("quantization_config") or not isinstance(beside, Mapping):
        return checkpoint.config
    return {**checkpoint.config, "quantization_config": {"quant_method": "modelopt", **beside}}
