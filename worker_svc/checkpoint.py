"""Where a checkpoint is: a local directory, or a repository on the Hugging Face hub."""

import json
from pathlib import Path
from typing import Any

from contract.domain.errors import ErrorCode, PenstockError
from worker_svc.core.config import ModelConfig, parse_config

_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def broken(message: str) -> PenstockError:
    """A checkpoint that cannot be used: the operator must look."""
    return PenstockError(ErrorCode.INTERNAL, message, param="model")


def resolve_checkpoint(model: str, revision: str | None = None) -> Path:
    """The directory of `model`; a hub id is downloaded into the hub's cache first.

    Raises:
        PenstockError: INTERNAL, neither a directory nor a repository that can be had.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or path.is_absolute() or model.startswith("."):
        raise broken(f"{model} is not a checkpoint directory")
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (slow to import, seldom needed)

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_WANTED))
    except Exception as error:
        raise broken(f"{model} is neither a directory nor a model that the hub gives: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint.

    Raises:
        PenstockError: INTERNAL, it is missing or not an object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise broken(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise broken(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise broken(f"{path} is not a JSON object")
    return value


def read_model_config(directory: Path) -> ModelConfig:
    """The model in `directory`.

    `generation_config.json` has the last word on EOS, as it has in transformers.

    Raises:
        PenstockError: see `parse_config`.
    """
    path = directory / "config.json"
    if not path.exists():
        raise broken(
            f"{path} is missing, without which {directory} is no checkpoint: give the directory that holds it beside "
            "the weights, or fetch the checkpoint again"
        )
    fields = read_json(path)
    generation = directory / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation).get("eos_token_id")
        if eos is not None:
            fields["eos_token_id"] = eos
    return parse_config(fields, str(path))
