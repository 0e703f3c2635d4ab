"""The model that a checkpoint's `config.json` describes."""

from contract.domain.errors import broken
from servicekit.checkpoint.model import CONFIG, Checkpoint
from worker_svc.core.config import ModelConfig, parse_config


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
    return parse_config(checkpoint.config, str(path))
