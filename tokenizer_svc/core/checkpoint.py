"""Where a model's text files are, and the JSON in them."""

import json
from pathlib import Path
from typing import Any

from contract.domain.errors import ErrorCode, PenstockError

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)


def broken(message: str) -> PenstockError:
    """An error that the operator must mend: the installed model is not usable as it is."""
    return PenstockError(ErrorCode.INTERNAL, message)


def find_checkpoint(model: str, revision: str | None = None) -> Path:
    """The local directory of `model`, which is a directory or a hub id; of a hub id only the text files are fetched.

    Raises:
        PenstockError: INTERNAL (operator): neither a directory nor a model that the hub gives us.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    # A path that is not there must not be asked of the hub: its answer would hide the typing mistake.
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise broken(f"the model directory {model} does not exist; give the path of a checkpoint or a hub id")
    from huggingface_hub import snapshot_download  # noqa: PLC0415  only a hub id needs it, and it is slow to import

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(TEXT_FILES)))
    except (OSError, ValueError) as error:
        raise broken(
            f"{model} is not a directory here, and the hub did not give it to us ({type(error).__name__}: "
            f"{str(error)[:300]}); check the name, the network and the access token, or give a local directory"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an absent file is an empty one.

    Raises:
        PenstockError: INTERNAL (operator): unreadable, not JSON or not an object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise broken(f"{path} cannot be read as JSON ({error}); fetch the checkpoint again") from error
    if not isinstance(value, dict):
        raise broken(f"{path} must hold a JSON object; fetch the checkpoint again")
    return value
